"""The PolicyStore actor: policy versions on disk, and in the object store for all generators."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from pixelis.errors import BadInput, InfraFailure, MissingFile
from pixelis.files import DAMAGED, damaged_file, write_json
from pixelis.policy.adapters import Adapter, load_adapter, save_adapter
from pixelis.records import PolicyVersion, VersionStatus


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class PolicyStore:
    """Monotone versions of the weights; version 0 is the adapter of ``initial``, or the bare model.

    Keeps all records, and the weights of version 0, of pinned ones, the last ``rollback`` promoted and the newest
    ``keep`` versions. A candidate (``promote=False``) is not served until ``promote`` is called. Raises BadInput ``damaged``
    if the records are damaged or gone.
    """

    def __init__(self, run_dir: str, initial: str | None = None, keep: int = 8, rollback: int = 3):
        self.folder = Path(run_dir) / "versions"
        self.newest, self.rollback = keep, rollback
        self.versions: dict[int, PolicyVersion] = {}
        self.refs: dict[int, ray.ObjectRef | None] = {}
        self.streams: dict[int, Any] = {}
        index, records = self.folder / "versions.json", list[PolicyVersion]()
        fix = f"restore it, or move {self.folder} away; policy.adapter can be one of its versions"
        if index.is_file():
            with damaged_file(index, fix):
                records = [PolicyVersion.model_validate(row) for row in json.loads(index.read_bytes())]
                records[0]  # there is always version 0
        elif {path.parent.name for path in self.folder.glob("v??????/*")} - {"v000000"}:
            raise BadInput(f"{index} is gone, and its versions are there", code=DAMAGED, fix=fix)
        first = load_adapter(initial) if initial else None
        digest = first.sha256() if first is not None else ""
        if records and records[0].sha256 == digest:
            self.versions = {record.version: record for record in records}
        else:  # a new run, or the records of a run with another starting policy
            self._add(first, digest, PolicyVersion(version=0, status=VersionStatus.PROMOTED, stage="initial"))

    def publish(
        self,
        adapter: Adapter,
        stage: str,
        step: int,
        metrics: dict[str, float] | None = None,
        promote: bool = True,
        restart: bool = False,
        later: bool = False,
    ) -> int:
        """Store ``adapter``; returns the next number, or that of equal weights, so that calls may be retried.

        ``restart``: the learner restarts from these weights, so later versions are rolled back. ``later``: the
        caller has them written to disk by `keep`, while generators load them.
        """
        digest = adapter.sha256()
        record = self._equal(digest, promote)
        if record is None:
            record = self._new(stage, step, metrics, promote)
        for other in self.list() if restart else []:
            if other.version > record.version:
                other.status = VersionStatus.ROLLED_BACK
        self._add(adapter, digest, record, later)
        return record.version

    def announce(
        self,
        content: tuple[str, int],
        stage: str,
        step: int,
        metrics: dict[str, float] | None = None,
        promote: bool = True,
        address: Any = None,
    ) -> int:
        """Version of weights, given as (hash, bytes), which the learner broadcasts before `keep`."""
        record = self._equal(content[0], promote)
        if record is None or not self._has_weights(record):
            record = record or self._new(stage, step, metrics, promote)
            record.sha256, record.bytes = content
            record.created_at = record.created_at or time.time()
            self.versions[record.version], self.streams[record.version] = record, address
            self._save()
        return record.version

    def stream_of(self, version: int) -> Any:
        """Address from which the learner broadcasts a version; None once it is stored."""
        return self.streams.get(version)

    async def keep(self, version: int, adapter: Adapter) -> None:
        """Write the weights of a version to disk."""
        record = self._record(version, weights=False)
        if not self._has_weights(record):
            await asyncio.to_thread(save_adapter, adapter, self._path(version))
        self.streams.pop(version, None)
        self._save()

    def _equal(self, digest: str, promote: bool) -> PolicyVersion | None:
        """The newest version of these weights that may be served.

        A training step that is repeated after a restart serves its version again: sampling depends on the
        number, and the repeated run must draw what an uninterrupted one draws.
        """
        equal = [record for record in self.list() if record.sha256 == digest]
        removed = VersionStatus.ROLLED_BACK, VersionStatus.UNLEARNT
        servable = [record for record in equal if record.status not in removed]
        if not servable and equal and promote:
            equal[-1].status = VersionStatus.PROMOTED
            servable = equal
        return servable[-1] if servable else None

    def _new(self, stage: str, step: int, metrics: dict[str, float] | None, promote: bool) -> PolicyVersion:
        status = VersionStatus.PROMOTED if promote else VersionStatus.CANDIDATE
        number, parent = max(self.versions) + 1, self.promoted()
        return PolicyVersion(
            version=number, parent=parent, status=status, stage=stage, step=step, metrics=metrics or {}
        )

    def _add(self, adapter: Adapter | None, digest: str, record: PolicyVersion, later: bool = False) -> None:
        if adapter is not None:
            record.sha256, record.bytes = digest, adapter.nbytes
            # A folder without a record was left by another run, or by a crash before the record was written.
            if record.version not in self.versions:
                shutil.rmtree(self._path(record.version), ignore_errors=True)
            if not later and not self._path(record.version).is_dir():
                save_adapter(adapter, self._path(record.version))
        record.created_at = record.created_at or time.time()
        self.versions[record.version] = record
        if record.version not in self.refs:
            self.refs[record.version] = ray.put(adapter)
        self._save()

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:06d}"

    def _save(self) -> None:
        promoted = [v.version for v in self.list() if v.status is VersionStatus.PROMOTED]
        retained = {0, *promoted[-self.rollback :], *sorted(self.versions)[-self.newest :]}
        retained |= {v.version for v in self.list() if v.pinned}
        unlearnt = {v.version for v in self.list() if v.status is VersionStatus.UNLEARNT}
        for version in set(self.versions) - retained | unlearnt:
            self.refs.pop(version, None)
            self.streams.pop(version, None)
            shutil.rmtree(self._path(version), ignore_errors=True)
        write_json(self.folder / "versions.json", [v.model_dump(mode="json") for v in self.list()])

    def _has_weights(self, record: PolicyVersion) -> bool:
        return not record.sha256 or self._path(record.version).is_dir()

    def promoted(self) -> int:
        stored = filter(self._has_weights, self.versions.values())
        return max((v.version for v in stored if v.status is VersionStatus.PROMOTED), default=0)

    def get(self, version: int) -> list[Any]:
        """``[ref]`` of the version's Adapter, in a list so that Ray passes the reference; bare model: None.

        Raises MissingFile for a version without weights, InfraFailure for one that is not stored yet.
        """
        if version not in self.refs:
            if version == max(self.versions) and not self._has_weights(self.versions[version]):
                message = f"the weights of version {version} are not stored yet"
                raise InfraFailure(message, code="not_stored", fix="try again")
            record = self._record(version)
            self.refs[version] = ray.put(load_adapter(self._path(version)) if record.sha256 else None)
        return [self.refs[version]]

    def promote(self, version: int) -> None:
        """Promote ``version`` and roll back all later promoted versions. MissingFile without its weights."""
        record = self._record(version)
        for later in self.versions.values():
            if later.version > version and later.status is VersionStatus.PROMOTED:
                later.status = VersionStatus.ROLLED_BACK
        record.status = VersionStatus.PROMOTED
        self._save()

    def roll_back(self, version: int) -> int:
        """Roll back ``version``; returns the version that is promoted now. BadInput for version 0."""
        if version == 0:
            raise BadInput("version 0 is the starting policy and cannot be rolled back", code="no_way_back")
        self._record(version, weights=False).status = VersionStatus.ROLLED_BACK
        self._save()
        return self.promoted()

    def unlearn(self, versions: Sequence[int]) -> None:
        """Remove the weights of versions that have learnt from deleted tasks."""
        for version in versions:
            self.versions[version].status = VersionStatus.UNLEARNT
        self._save()

    def pin(self, version: int) -> None:
        """Keep the weights of a version: recorded updates begin from them."""
        self.versions[version].pinned = True
        self._save()

    def _record(self, version: int, weights: bool = True) -> PolicyVersion:
        record = self.versions.get(version)
        if record is None or (weights and not self._has_weights(record)):
            fix = f"versions with weights: {[v.version for v in self.list() if self._has_weights(v)]}"
            raise MissingFile(f"no weights of policy version {version}", code="unknown_version", fix=fix)
        return record

    def list(self) -> list[PolicyVersion]:
        return sorted(self.versions.values(), key=lambda v: v.version)
