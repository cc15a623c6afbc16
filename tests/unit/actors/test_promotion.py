"""Promotion over crashes: the history survives, weights are never mistaken for others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pixelis.actors import policy_store
from pixelis.actors.generator_router import GeneratorRouter
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.promotion import Promotion
from pixelis.config import load
from pixelis.errors import BadInput
from pixelis.evolution.canary import Scores
from pixelis.policy.adapters import Adapter, save_adapter
from pixelis.records import VersionStatus

Store = PolicyStore.__ray_metadata__.modified_class  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_store.ray, "put", lambda value: value)


def adapter(value: float) -> Adapter:
    return Adapter({"layer.A": np.full((2, 3), value, np.float32)}, alpha=2, rank=2, base_sha256="base")


class Handle:
    """The store behind the interface of an actor handle."""

    def __init__(self, store: Any):
        self.store = store

    def __getattr__(self, name: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            return getattr(self.store, name)(*arguments)

        return SimpleNamespace(remote=remote)


class Judge:
    """Gives every version a configured accuracy and causal use."""

    def __init__(self) -> None:
        self.right: dict[int, int] = {}
        self.use, self.uses = 0.0, dict[int, float]()

    async def ready(self) -> None: ...

    async def judge(self, version: int) -> Scores:
        self.use = self.uses.get(version, 2.0)
        return {f"q{i}": float(i < self.right.get(version, 90)) for i in range(100)}


class Killed(BaseException):
    """The end of the process."""


class Interrupted(GeneratorRouter):
    """Loads version ``at`` when ``go`` is set, or kills its owner before the promotion or rollback is saved."""

    def __init__(self, at: int = -1, kills: bool = True):
        super().__init__([])
        self.at, self.kills, self.entered, self.go = at, kills, asyncio.Event(), asyncio.Event()

    async def load(self, version: int, arrange: Any = None) -> None:
        if version == self.at:
            if self.kills:
                raise Killed
            self.entered.set()
            await self.go.wait()
        await super().load(version, arrange)


def new_promotion(folder: Path, store: Any, judge: Judge, dies_at: int = -1) -> Promotion:
    async def note(*_: Any) -> None: ...

    canary = ["evolution.canary.questions=q.jsonl", "evolution.canary.count=100"]
    config = load(None, [f"run.dir={folder}", *canary])
    return Promotion(config, Handle(store), Interrupted(dies_at), judge, note)  # type: ignore[arg-type]


async def offer(promotion: Promotion, store: Any, *values: float) -> None:
    await promotion.open()
    await promotion.begin(promotion.served)
    for value in values:
        await promotion.offer(candidate(store, value))


def candidate(store: Any, value: float) -> int:
    return store.publish(adapter(value), "evolve", 0, {}, promote=False)


def opened(folder: Path, store: Any, judge: Judge) -> Promotion:
    """The promotion of a restarted service."""
    restarted = new_promotion(folder, store, judge)
    asyncio.run(restarted.open())
    return restarted


@pytest.mark.parametrize("min_use", [None, 1.0])
def test_a_better_candidate_that_no_longer_looks_is_refused_if_that_is_asked_for(
    tmp_path: Path, min_use: float | None
) -> None:
    store, judge = Store(str(tmp_path)), Judge()
    judge.right, judge.uses = {1: 99, 2: 99}, {1: 0.1, 2: 1.5}
    promotion = new_promotion(tmp_path, store, judge)
    promotion.settings = promotion.settings.model_copy(update={"min_use": min_use})
    asyncio.run(offer(promotion, store, 1.0))
    assert promotion.served == (1 if min_use is None else 0)
    assert promotion.curve[-1]["reason"] == ("better" if min_use is None else "does_not_look")
    asyncio.run(offer(promotion, store, 2.0))
    assert promotion.served == 2


def test_a_candidate_without_evidence_is_not_served_and_the_learner_goes_on_from_it(tmp_path: Path) -> None:
    store, judge, entries = Store(str(tmp_path)), Judge(), list[tuple[str, str, str]]()
    judge.right = {1: 88, 2: 93}  # of 100, before 90: neither a fall nor its absence is certain of version 1

    async def note(event: str, _: str, action: str, result: str, __: dict[str, Any]) -> None:
        entries.append((event, action, result))

    promotion = new_promotion(tmp_path, store, judge)
    promotion.note = note  # type: ignore[method-assign]
    asyncio.run(offer(promotion, store, 1.0))
    assert (promotion.served, promotion.restore, promotion.base) == (0, None, 0)
    assert (store.list()[1].status, promotion.curve[-1]["decision"]) == (VersionStatus.CANDIDATE, "wait")
    assert ("promotion", "wait", "skipped") in entries
    ordered = asyncio.run(promotion.promote(1, "ann"))
    assert (ordered["promoted"], ordered["reason"]) == (False, "inconclusive"), (
        "a person needs evidence, too, unless forced"
    )
    asyncio.run(offer(promotion, store, 2.0))
    assert (promotion.served, promotion.restore, promotion.base) == (2, None, 2)


def test_a_fall_of_the_version_before_does_not_roll_back_one_that_is_promoted_meanwhile(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        store, judge = Store(str(tmp_path)), Judge()
        judge.right = {0: 90, 1: 95, 2: 99}
        promotion = new_promotion(tmp_path, store, judge)
        await offer(promotion, store, 1.0)
        assert promotion.served == 1
        router = promotion.router = Interrupted(2, kills=False)
        promoting = asyncio.create_task(promotion.offer(candidate(store, 2.0)))
        await router.entered.wait()
        judge.right[1] = 50
        watch = asyncio.create_task(promotion.check_served())
        await asyncio.sleep(0.05)
        router.go.set()
        assert (await promoting, await watch) == (True, False)
        assert (promotion.served, promotion.restore, promotion.rollbacks) == (2, None, 0)
        assert [v.status for v in store.list()] == [VersionStatus.PROMOTED] * 3
        judge.right[2] = 50
        assert await promotion.check_served()
        assert promotion.served == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("forced", [False, True])
def test_a_crash_during_a_promotion_keeps_the_history(tmp_path: Path, forced: bool) -> None:
    store, judge = Store(str(tmp_path)), Judge()
    asyncio.run(offer(new_promotion(tmp_path, store, judge), store, 1.0))

    async def promote() -> None:
        dying = new_promotion(tmp_path, store, judge, dies_at=2)
        await dying.open()
        if forced:
            candidate(store, 2.0)
            await dying.promote(2, "ann", force=True)
        else:
            await offer(dying, store, 2.0)

    with pytest.raises(Killed):
        asyncio.run(promote())
    judge.right[2] = 60
    restarted = opened(tmp_path, store, judge)
    assert (restarted.served, restarted.unjudged) == (2, forced)
    assert [version for version, _ in restarted.history.entries] == [0, 1, 2]
    assert len(restarted.curve) == (1 if forced else 2)
    assert asyncio.run(restarted.check_served()), "it is compared with its ancestors"
    assert restarted.served == 1


def test_a_crash_during_a_rollback_forgets_withdrawn_versions_only(tmp_path: Path) -> None:
    store, judge = Store(str(tmp_path)), Judge()
    asyncio.run(offer(new_promotion(tmp_path, store, judge), store, 1.0, 2.0))

    async def back() -> None:
        dying = new_promotion(tmp_path, store, judge, dies_at=1)
        await dying.open()
        await dying.roll_back(None, "ann", "ordered")

    with pytest.raises(Killed):
        asyncio.run(back())
    restarted = opened(tmp_path, store, judge)
    assert (restarted.served, [version for version, _ in restarted.history.entries]) == (1, [0, 1])


def test_another_starting_policy_starts_a_new_history(tmp_path: Path) -> None:
    judge = Judge()
    store = Store(str(tmp_path))
    asyncio.run(offer(new_promotion(tmp_path, store, judge), store, 1.0))
    save_adapter(adapter(9.0), tmp_path / "other")
    restarted = opened(tmp_path, Store(str(tmp_path), str(tmp_path / "other")), judge)
    assert (restarted.served, restarted.history, restarted.curve) == (0, None, [])


def test_a_folder_without_a_record_is_not_used(tmp_path: Path) -> None:
    """A folder left by a crash before the index was written, or by a run with another starting policy."""
    first = Store(str(tmp_path))
    save_adapter(adapter(1.0), tmp_path / "versions" / "v000001")
    assert first.publish(adapter(2.0), "evolve", 1) == 1
    repeated = Store(str(tmp_path))
    assert repeated.list()[1].sha256 == adapter(2.0).sha256()
    assert repeated.get(1)[0].sha256() == adapter(2.0).sha256()
    for value in (5.0, 6.0):
        save_adapter(adapter(value), tmp_path / f"start-{value}")
        other = Store(str(tmp_path), str(tmp_path / f"start-{value}"))
        assert other.publish(adapter(value + 0.5), "evolve", 1) == 1
        restarted = Store(str(tmp_path), str(tmp_path / f"start-{value}"))
        assert (restarted.promoted(), restarted.get(0)[0].sha256()) == (1, adapter(value).sha256())


@pytest.mark.parametrize("damage", ["gone", "emptied", "cut", "of another kind"])
def test_without_its_scores_the_served_version_is_judged_anew(tmp_path: Path, damage: str) -> None:
    store, judge, entries = Store(str(tmp_path)), Judge(), list[tuple[str, dict[str, Any]]]()
    judge.right = {0: 90, 1: 99}
    asyncio.run(offer(new_promotion(tmp_path, store, judge), store, 1.0))
    file = tmp_path / "versions" / "canary.json"
    content = {"emptied": b"", "cut": file.read_bytes()[:-40], "of another kind": b'{"key": 3}'}
    file.unlink() if damage == "gone" else file.write_bytes(content[damage])

    async def note(event: str, *others: Any) -> None:
        entries.append((event, others[-1]))

    restarted = new_promotion(tmp_path, store, judge)
    restarted.note = note  # type: ignore[method-assign]
    asyncio.run(restarted.open())
    assert restarted.served == 1
    assert [(event, str(file) in details["cause"]) for event, details in entries] == [("repair", True)]
    assert file.with_suffix(".damaged").exists() == (damage != "gone")
    judge.right[1] = 60
    assert asyncio.run(restarted.check_served()), "it is compared with the version before"
    assert restarted.served == 0


@pytest.mark.parametrize("damage", ["gone", "emptied", "no version", "cut", "of another kind"])
def test_versions_without_their_records_are_not_overwritten(tmp_path: Path, damage: str) -> None:
    store = Store(str(tmp_path))
    candidate(store, 1.0)
    file = tmp_path / "versions" / "versions.json"
    rows = json.loads(file.read_bytes())
    rows[1]["status"] = "promotedd"
    content = {
        "emptied": "",
        "no version": "[]",
        "cut": file.read_text()[:-9],
        "of another kind": json.dumps(rows),
    }
    file.unlink() if damage == "gone" else file.write_text(content[damage])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match=r"versions\.json is (damaged|gone)") as caught:
        Store(str(tmp_path))
    assert caught.value.code == "damaged"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "versions").rename(tmp_path / "away")  # what the error says to do
    assert [version.version for version in Store(str(tmp_path)).list()] == [0]
