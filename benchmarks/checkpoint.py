"""Writing and reading a checkpoint: how long training waits, and the time until it is complete against plain
files.

    python -m benchmarks.checkpoint

Goals: training waits for at most 1 % of the time of a write; a write takes at most 3 times the plain files
(it hashes them and flushes its folder as well); a restore reads every byte twice (checksum, values).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.harness import Report, compare, parse_args, time_call
from pixelis.policy import checkpoint

TENSORS = 64


def plain(tensors: dict[str, dict[str, np.ndarray]], folder: Path) -> None:
    """Write the same files without checksums and without a commit, flushed to disk."""
    folder.mkdir(exist_ok=True)
    for stem, arrays in tensors.items():
        path = folder / f"{stem}.safetensors"
        save_file(arrays, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=600, help="of weights and two moments together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    args = parse_args(parser, megabytes=6, repeats=1)
    report = Report("checkpoint")
    size = args.megabytes * 1_000_000 // (3 * TENSORS * 4)
    rng = np.random.default_rng(0)
    weights = {f"layer{i}": rng.standard_normal(size, np.float32) for i in range(TENSORS)}
    moments = {f"{name}.{m}": values for name, values in weights.items() for m in ("exp_avg", "exp_avg_sq")}
    tensors = {"model": weights, "optimizer": moments}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run, writer, waits = Path(folder), checkpoint.Writer(), []

        def write() -> None:
            waits.append(time_call(lambda: writer.start(run, 1, tensors, {"state": {}})))
            writer.wait()

        ratio = compare(write, lambda: plain(tensors, run / "plain"), max(2, args.repeats))
        report.row("write / plain files", ratio, "<= 3")
        report.row("training waits / write", float(np.median(waits)) / ratio.ours_s, "<= .01")
        found = run / "checkpoints" / "step_00000001"
        verify = time_call(lambda: checkpoint.is_complete(found))
        read = time_call(
            lambda: [
                len(stored) and [stored[n] for n in stored]
                for stored in checkpoint.read(found, False)[0].values()
            ]
        )
        report.row("GB/s of verifying", args.megabytes / 1e3 / verify)
        report.row("GB/s of reading", args.megabytes / 1e3 / read)
    report.close()


if __name__ == "__main__":
    main()
