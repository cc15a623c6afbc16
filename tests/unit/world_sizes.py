"""A worker of tests/unit/policy/test_world_sizes.py: resumes the newest checkpoint, if any, trains, and saves
the next one.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import tiny_policy
import torch.distributed as dist
from two_workers import CASES, samples_of

from pixelis.policy import checkpoint

NAMES = {"stage2": "all parameters, stage 2", "stage3": "all parameters, stage 3"}
STEPS = 2


def main(out: str, folders: dict[str, str]) -> None:
    """Train each case for STEPS steps on this worker's samples."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{out}/rendezvous{world}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    tiny_policy.folder = lambda family: Path(folders[family])
    losses: dict[str, list[float]] = {}
    for folder, name in NAMES.items():
        case = CASES[name]
        trainer = case.trainer()
        run = Path(out, folder)
        latest = checkpoint.latest(run)
        if latest is not None:
            trainer.restore(latest)
            tensors, _ = checkpoint.read(latest)
            resumed = {"model": trainer.adapter().tensors, "optimizer": trainer.model.zero.moments()}
            for kind, arrays in resumed.items():
                assert arrays.keys() == tensors[kind].keys()
                assert all(np.array_equal(array, tensors[kind][key]) for key, array in arrays.items()), kind
        losses[folder] = [
            trainer.update(samples_of(case.family)[rank::world])["policy/loss"] for _ in range(STEPS)
        ]
        saved = trainer.save(run)
        sizes = [path.stat().st_size for path in saved.glob("optimizer.*")]
        assert len(sizes) == world
        assert max(sizes) < 1.3 * min(sizes), "the workers' parts differ"
        trainer.close()
    if rank == 0:
        Path(out, f"losses{world}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
