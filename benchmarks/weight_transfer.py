"""A version of all parameters from the learner to its generators: broadcast (gloo) against the object store,
side by side.

    python -m benchmarks.weight_transfer

Both times end when every receiver has read the weights. Through the object store a version is hashed, written
to disk and put before it is read; a broadcast hashes it first and writes it afterwards. Goals: broadcast /
object store <= 1 on one node, where the object store is shared memory; bytes sent / bytes of the parameters
1.00 +- 1 %.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from typing import Any

import numpy as np
import ray

from benchmarks.harness import Report, compare, local_ray, parse_args, time_call
from pixelis import config
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.weights import arrange_stream
from pixelis.policy.adapters import Adapter
from pixelis.policy.tensor_parts import FlatTensors
from pixelis.policy.weight_stream import WeightSender

TENSORS = 32


@ray.remote(num_cpus=0)
class Receiver:
    """Gets a version as a generator does."""

    def __init__(self, store: Any):
        self.store = store

    def read(self, version: int) -> int:
        """Read the version from the object store; return a sum over its bytes."""
        (ref,) = ray.get(self.store.get.remote(version))
        return sum(int(a.sum(dtype=np.int64)) for a in ray.get(ref).tensors.values())

    def receive(self, place: Any) -> int:
        """Receive the version from a broadcast; return the same sum."""
        from pixelis.policy.weight_stream import receive

        return sum(int(a.sum(dtype=np.int64)) for a in receive(place).tensors.values())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="of a version in bfloat16")
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    args = parse_args(parser, megabytes=4, repeats=2)
    report = Report("weight_transfer")
    rng = np.random.default_rng(0)
    columns = args.megabytes * 1_000_000 // (2 * TENSORS * 64)
    flat = FlatTensors([(f"layer{i}", "uint16", (64, columns)) for i in range(TENSORS)])
    for values in flat.values():
        values[...] = rng.integers(0, 2**14, values.shape, np.uint16)
    weights, number, sent = Adapter(flat, 1, 1, "benchmark", "full"), [0], dict[str, float]()
    store_bytes = max(300_000_000, 8 * flat.data.nbytes)
    with (
        local_ray(config.load(None, ["cluster.cpus=4", f"cluster.object_store_bytes={store_bytes}"])),
        tempfile.TemporaryDirectory() as run,
    ):
        store: Any = PolicyStore.remote(run, None, 1, 1)  # type: ignore[attr-defined]
        receivers = {f"r{i}": Receiver.remote(store) for i in range(args.receivers)}  # type: ignore[attr-defined]
        sender = WeightSender(ray.util.get_node_ip_address(), "gloo", 60.0)

        def changed() -> None:
            number[0] += 1
            flat["layer0"][0, 0] = number[0]

        def through_the_store() -> None:
            changed()
            version = ray.get(store.publish.remote(weights, "rft", number[0]))
            check(ray.get([r.read.remote(version) for r in receivers.values()]))

        def broadcast() -> None:
            changed()
            version = ray.get(
                store.announce.remote(
                    (weights.sha256(), weights.nbytes), "rft", number[0], None, True, sender.address
                )
            )
            places = ray.get(arrange.remote(store, version, list(receivers)))
            thread = threading.Thread(target=lambda: sent.update(sender.send(version, weights)))
            thread.start()
            check(ray.get([r.receive.remote(places[name]) for name, r in receivers.items()]))
            thread.join()

        def check(sums: list[int]) -> None:
            assert set(sums) == {sum(int(a.sum(dtype=np.int64)) for a in flat.values())}

        arrange = ray.remote(num_cpus=0)(arranged)
        report.row("broadcast / object store", compare(broadcast, through_the_store, args.repeats), "<= 1")
        report.row("bytes sent / bytes of the parameters", sent["bytes"] / weights.nbytes, "1.00 +- 1 %")
        report.row("GB/s of the broadcast to each receiver", sent["bytes"] / sent["seconds"] / 1e9)
        report.row("GB/s of the hash", weights.nbytes / time_call(weights.sha256) / 1e9)
    report.close()


def arranged(store: Any, version: int, names: list[str]) -> Any:
    """Ask for the broadcast, as the Coordinator does."""
    import asyncio

    return asyncio.run(arrange_stream(store, version, names))


if __name__ == "__main__":
    main()
