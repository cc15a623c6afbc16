"""Broadcasts of whole models between processes, with gloo; a process that fails spoils only its broadcast."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pixelis.errors import InfraFailure
from pixelis.policy import weight_stream
from pixelis.policy.adapters import Adapter
from pixelis.policy.weight_stream import StreamPlace, WeightSender, receive, request

HOST = "127.0.0.1"


def model(seed: int, megabytes: int = 1) -> Adapter:
    rng = np.random.default_rng(seed)
    tensors = {f"layer{i}.weight": rng.integers(0, 2**15, (8, megabytes * 8192), np.uint16) for i in range(8)}
    return Adapter({**tensors, "norm": np.ones(3, np.float32)}, 1, 1, "base", "full")


def receiver(place: StreamPlace, pipe: Any, dies_at: int | None = None) -> None:
    """Receive in another process; with ``dies_at`` end without a word at that bucket."""
    if dies_at is not None:
        original, count = weight_stream._Channel.broadcast, [0]

        def broadcast(self: Any, array: np.ndarray) -> np.ndarray:
            count[0] += 1
            if count[0] > dies_at:
                os._exit(9)
            return original(self, array)

        weight_stream._Channel.broadcast = broadcast  # type: ignore[method-assign]
    weight_stream.BUCKET = 1 << 18
    try:
        adapter = receive(place)
        pipe.send((adapter.sha256(), adapter.kind, adapter.base_sha256))
    except InfraFailure as error:
        pipe.send(error.code)


def start(sender: WeightSender, group: str, dies_at: tuple[int | None, ...]) -> tuple[list[Any], list[Any]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank, at in enumerate(dies_at, 1):
        ours, theirs = context.Pipe(duplex=False)
        place = StreamPlace(sender.address, group, rank, len(dies_at) + 1)
        process = context.Process(target=receiver, args=(place, theirs, at), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    return pipes, processes


@pytest.mark.slow
def test_every_receiver_has_the_learners_bytes_and_a_death_spoils_one_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET", 1 << 18)
    sender, versions = WeightSender(HOST, "gloo", 30.0), [model(0), model(1)]
    failed, failing = start(sender, "first", (None, None, 3))
    request(sender.address, 1, "first", 4)
    with pytest.raises(InfraFailure, match="version 1 was not sent") as caught:
        sender.send(1, versions[0])
    assert caught.value.code == "stream_failed"
    assert [pipe.recv() for pipe in failed[:2]] == ["stream_failed"] * 2, (
        "they would serve a part of the weights"
    )
    sound, processes = start(sender, "second", (None, None))
    request(sender.address, 2, "second", 3)
    sent = sender.send(2, versions[1])
    assert [pipe.recv() for pipe in sound] == [(versions[1].sha256(), "full", "base")] * 2
    assert sent["receivers"] == 2
    assert sent["bytes"] == pytest.approx(versions[1].nbytes, rel=0.001)
    for process in (*failing, *processes):
        process.join(10)


def test_a_version_that_nobody_asks_for_ends_the_wait_of_the_learner() -> None:
    sender = WeightSender(HOST, "gloo", 0.3)
    started = time.monotonic()
    with pytest.raises(InfraFailure, match="version 1 was not sent"):
        sender.send(1, model(0))
    assert time.monotonic() - started < 10


def test_a_version_that_all_load_from_the_store_or_that_is_given_up_keeps_the_learner_waiting_no_longer() -> (
    None
):
    sender = WeightSender(HOST, "gloo", 30.0)
    assert request(sender.address, 1, "nobody", 1)
    assert sender.send(1, model(0))["receivers"] == 0
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 2, model(0))
        sender.give_up(2)
        with pytest.raises(InfraFailure, match="not asked for before the next one"):
            sending.result(10)
    assert not request(sender.address, 2, "late", 2), (
        "the generators would wait for a broadcast that never comes"
    )


def test_receivers_of_a_learner_that_is_gone_are_told() -> None:
    sender = WeightSender(HOST, "gloo", 0.5)
    place = StreamPlace(sender.address, "g", 1, 2)
    with ThreadPoolExecutor(1) as pool, pytest.raises(InfraFailure, match="weights were not received"):
        pool.submit(receive, place).result()
    gone = StreamPlace(weight_stream.StreamAddress(HOST, 9, "gloo", 0.5), "g", 1, 2)
    with pytest.raises(InfraFailure):
        receive(gone)
    with pytest.raises(InfraFailure, match="cannot be reached"):
        request(gone.address, 1, "g", 2)
