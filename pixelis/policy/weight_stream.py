"""Streams all parameters of a version from the learner to the generators, in buckets over gloo or NCCL.

A receiver requests the broadcast in the learner's store and names a group, used once, that the learner and
the receivers join: a receiver gets all bytes, or fails and keeps its old version.
"""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from pixelis.errors import InfraFailure
from pixelis.policy.adapters import Adapter, adapter_of
from pixelis.policy.tensor_parts import FlatTensors

BUCKET = 1 << 26
"""Bytes of a broadcast."""
Backend = Literal["gloo", "nccl"]
_GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """A learner's store, with the backend and the timeout of each operation of its broadcasts."""

    host: str
    port: int
    backend: Backend
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A receiver's place in the group of a broadcast; the learner has rank 0."""

    address: StreamAddress
    group: str
    rank: int
    size: int


def request(address: StreamAddress, version: int, group: str, size: int) -> bool:
    """Ask the learner to broadcast a version to a group of `size`; False if it has given the version up."""
    text = json.dumps([group, size])
    try:
        return _connect(address).compare_set(_key(version), "", text).decode() == text
    except RuntimeError as error:
        raise _failure("the learner cannot be reached", error) from error


def receive(place: StreamPlace) -> Adapter:
    try:
        with _Channel(_connect(place.address), place.group, place.rank, place.size, place.address) as channel:
            lengths = channel.broadcast(np.zeros(2, np.int64))
            header = json.loads(channel.broadcast(np.zeros(lengths[0], np.uint8)).tobytes())
            tensors = FlatTensors(header["tensors"])
            for start in range(0, len(tensors.data), BUCKET):
                channel.broadcast(tensors.data[start : start + BUCKET])
    except RuntimeError as error:
        raise _failure("the weights were not received", error) from error
    return adapter_of(tensors, header["adapter"])


class WeightSender:
    """The learner's side. host: address of this node for the generators."""

    def __init__(self, host: str, backend: Backend, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        self.address = StreamAddress(host, self._store.port, backend, timeout_s)

    def send(self, version: int, adapter: Adapter) -> dict[str, float]:
        """Wait for the request of a version and broadcast it; returns bytes, receivers and seconds."""
        try:
            self._store.wait([_key(version)], timedelta(seconds=self.address.timeout_s))
            if (text := self._store.get(_key(version)).decode()) == _GIVEN_UP:
                raise InfraFailure(
                    f"version {version} was not asked for before the next one", code="stream_failed"
                )
            group, size = json.loads(text)
            started, tensors = time.perf_counter(), FlatTensors.of(adapter.tensors)
            if size == 1:  # every generator loads it from the policy store
                return {"bytes": 0.0, "receivers": 0.0, "seconds": 0.0}
            described = json.dumps({"tensors": tensors.layout, "adapter": adapter.metadata()})
            header = np.frombuffer(described.encode(), np.uint8)
            with _Channel(self._store, group, 0, size, self.address) as channel:
                channel.broadcast(np.array([len(header), len(tensors.data)], np.int64))
                channel.broadcast(header)
                for start in range(0, len(tensors.data), BUCKET):
                    channel.broadcast(tensors.data[start : start + BUCKET])
        except RuntimeError as error:
            raise _failure(f"version {version} was not sent", error) from error
        return {
            "bytes": float(len(tensors.data)),
            "receivers": size - 1.0,
            "seconds": time.perf_counter() - started,
        }

    def give_up(self, version: int) -> None:
        """End the wait for the request of a version; a broadcast that has begun goes on."""
        # Its own connection: that of the sender is locked while it waits.
        _connect(self.address).compare_set(_key(version), "", _GIVEN_UP)


class _Channel:
    """A process group of its own, beside the one that the learner's workers have."""

    def __init__(self, store: Any, group: str, rank: int, size: int, address: StreamAddress):
        timeout, store = timedelta(seconds=address.timeout_s), dist.PrefixStore(group, store)
        self._device: torch.device | None = None
        if address.backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._is_sender = 0, rank == 0

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        with warnings.catch_warnings():
            # The sender's is only read
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = torch.from_numpy(array)
        on_device = tensor.to(self._device) if self._device is not None else tensor
        self._group.broadcast([on_device], self._options).wait()
        if on_device is not tensor and not self._is_sender:
            tensor.copy_(on_device)
        return array

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the group when all have all bytes; after a failure at once, so that waiters fail."""
        if kind is None:
            self._group.barrier().wait()
        self._group = None


def _connect(address: StreamAddress) -> Any:
    return dist.TCPStore(
        address.host, address.port, is_master=False, timeout=timedelta(seconds=address.timeout_s)
    )


def _key(version: int) -> str:
    return f"request/{version}"


def _failure(text: str, error: RuntimeError) -> InfraFailure:
    return InfraFailure(
        f"{text}: {str(error).splitlines()[0] if str(error) else error!r}", code="stream_failed"
    )
