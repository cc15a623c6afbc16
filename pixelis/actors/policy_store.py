"""The PolicyStore actor: it owns the policy versions, on disk and as one object that every generator reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ray

from pixelis.policy.adapters import Adapter, load_adapter, save_adapter
from pixelis.policy.checkpoint import write_json
from pixelis.records import PolicyVersion, VersionStatus


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class PolicyStore:
    """Monotone versions of the policy's weights; version 0 is the starting policy.

    ``initial`` names a checkpoint folder whose adapter becomes version 0; without it version 0 is the bare model.
    """

    def __init__(self, run_dir: str, initial: str | None = None, keep: int = 8):
        self.folder = Path(run_dir) / "versions"
        self.keep = keep
        self.versions: dict[int, PolicyVersion] = {}
        self.refs: dict[int, ray.ObjectRef | None] = {}
        index = self.folder / "versions.json"
        first = load_adapter(initial) if initial else None
        known = [PolicyVersion.model_validate(row) for row in json.loads(index.read_text())] if index.is_file() else []
        if known and known[0].sha256 == (first.sha256() if first is not None else ""):
            self.versions = {record.version: record for record in known}
        else:  # a new run, or one that started from another policy, whose versions are none of this one's
            self._add(first, PolicyVersion(version=0, status=VersionStatus.PROMOTED, stage="initial"))

    def publish(
        self,
        adapter: Adapter,
        stage: str,
        step: int,
        metrics: dict[str, float] | None = None,
        promote: bool = True,
        restart: bool = False,
    ) -> int:
        """Keep ``adapter`` and return its version number: the next one, or the one these very weights already have.

        So a retried call publishes once. ``restart`` says that the learner begins here: later versions are withdrawn.
        """
        digest = adapter.sha256()
        for record in reversed(self.list()):
            if record.sha256 == digest and record.status is not VersionStatus.ROLLED_BACK:
                if restart:
                    for later in self.versions.values():
                        if later.version > record.version:
                            later.status = VersionStatus.ROLLED_BACK
                    self._save()
                return record.version
        status = VersionStatus.PROMOTED if promote else VersionStatus.CANDIDATE
        record = PolicyVersion(
            version=max(self.versions) + 1, parent=self.promoted(), status=status, stage=stage, step=step, metrics=metrics or {}
        )
        self._add(adapter, record)
        return record.version

    def _add(self, adapter: Adapter | None, record: PolicyVersion) -> None:
        if adapter is not None:
            record.sha256, record.bytes = adapter.sha256(), adapter.nbytes
            save_adapter(adapter, self.folder / f"v{record.version:06d}")
        record.created_at = time.time()
        self.versions[record.version] = record
        self.refs[record.version] = ray.put(adapter)
        self._save()

    def _save(self) -> None:
        promoted = self.promoted()
        for version in sorted(self.refs)[: -self.keep]:
            if version not in (0, promoted):
                del self.refs[version]
        write_json(self.folder / "versions.json", [v.model_dump(mode="json") for v in self.versions.values()])

    def promoted(self) -> int:
        """The newest promoted version."""
        return max((v.version for v in self.versions.values() if v.status is VersionStatus.PROMOTED), default=0)

    def get(self, version: int) -> list[Any]:
        """``[ref]`` of the version's Adapter (or of None for a bare model), wrapped so that Ray passes the reference."""
        if version not in self.versions:
            raise KeyError(f"no policy version {version}; known: {sorted(self.versions)}")
        if version not in self.refs:
            folder = self.folder / f"v{version:06d}"
            self.refs[version] = ray.put(load_adapter(folder) if folder.is_dir() else None)
        return [self.refs[version]]

    def promote(self, version: int) -> None:
        """Make ``version`` the one to serve."""
        self.versions[version].status = VersionStatus.PROMOTED
        self._save()

    def roll_back(self, version: int) -> int:
        """Withdraw ``version``; returns the version that is promoted now."""
        self.versions[version].status = VersionStatus.ROLLED_BACK
        self._save()
        return self.promoted()

    def list(self) -> list[PolicyVersion]:
        """All versions, oldest first."""
        return sorted(self.versions.values(), key=lambda v: v.version)
