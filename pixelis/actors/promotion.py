"""Decides which policy version serves: only one that passed the canary or that a person forced."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.canary import Canary
from pixelis.actors.cluster import actor_handle
from pixelis.actors.generator_router import GeneratorRouter
from pixelis.config import Config
from pixelis.errors import BadInput, MissingFile, PixelisError
from pixelis.evolution.canary import Decision, PromotionHistory, Scores
from pixelis.evolution.traffic_questions import MIN_QUESTIONS, TrafficQuestions, judge_traffic
from pixelis.files import damaged_file, write_json
from pixelis.records import PolicyVersion, VersionStatus

MAX_CURVE = 1000
"""Judgements kept for the canary curve."""

AuditWriter = Callable[[str, str, str, str, dict[str, Any]], Awaitable[None]]
"""Writes an audit event: event, actor, action, result, details."""


class Promotion:
    """Candidate, canary, promotion, rollback. Transitions are serialised; judging blocks none.

    ``base``: version that the learner's weights descend from; ``restore``: version that the learner must
    reset to before its next step. Without a canary every candidate is promoted.
    """

    def __init__(
        self,
        config: Config,
        store: ActorHandle,
        router: GeneratorRouter,
        canary: Canary | None,
        note: AuditWriter,
        traffic: TrafficQuestions | None = None,
    ):
        self.settings, self.store, self.router = config.evolution.canary, store, router
        self.canary, self.note, self.traffic = canary, note, traffic
        self.generators: list[str] = []
        self.served = 0
        self.candidate: int | None = None
        self.restore: int | None = None
        self.base: int | None = None
        self.withdrawn: set[int] = set()
        self.rollbacks = 0
        self.history: PromotionHistory | None = None
        self.unjudged = False
        """True after a forced promotion, until the served version was judged."""
        self.curve: list[dict[str, Any]] = []
        self.key: list[Any] = []
        """Identifies the saved scores: questions, starting policy and served version."""
        self.transition = asyncio.Lock()
        self.file = Path(config.run.dir) / "versions" / "canary.json"

    async def open(self) -> None:
        if self.canary is not None:
            await self.canary.ready()
        async with self.transition:
            await self._serve(await self.store.promoted.remote())
            await self._restore()

    async def begin(self, base: int | None) -> None:
        """The learner's weights descend from ``base``; it must reset them unless that is promoted."""
        async with self.transition:
            promoted = await self.store.promoted.remote()
            if promoted != self.served:
                await self._serve(promoted)
            self.base, self.restore = base, None if base == promoted else promoted

    def learner_reset(self, version: int | None) -> None:
        """The learner made a step after resetting to ``version``; None: without a reset."""
        if version is not None:
            self.base = version
            if self.restore == version:
                self.restore = None

    # -- candidates

    async def offer(self, version: int, shares: dict[str, Any] | None = None, replaces: bool = False) -> bool:
        """Judge a candidate and promote or refuse it; True if it serves now.

        If the canary fails or is inconclusive, it stays a candidate and the learner continues from it. One that
        ``replaces`` versions whose tasks were deleted needs no evidence: it is refused only for a fall.
        """
        record = await self._record(version)
        if record.status is not VersionStatus.CANDIDATE:
            return version == self.served
        details = record.model_dump(include={"version", "parent", "sha256", "step"})
        details |= {"shares": shares} if shares else {}
        await self.note("candidate", "learner", "publish", "success", details)
        self.candidate = version
        try:
            before, decision, scores, refused = self.served, None, None, ""
            if self.canary is not None and self.restore is None:
                try:
                    decision, scores = await self._judge(version)
                    if replaces and decision.waits:
                        decision = replace(decision, promote=True)
                except BadInput as error:  # the engine cannot load these weights
                    refused = error.code
                except (PixelisError, RayError) as error:
                    details = {"version": version, "cause": str(error)}
                    await self.note("canary", "canary", "judge", "failure", details)
                    return False
            async with self.transition:
                if self.restore is not None or self.served != before:
                    refused = "made from withdrawn weights"
                elif decision is not None and decision.waits and not decision.promote:
                    details = {"version": version, "served": self.served}
                    await self.note("promotion", "canary", "wait", "skipped", details)
                    return False
                elif decision is not None and not decision.promote:
                    refused = decision.reason
                if refused:
                    await self.store.roll_back.remote(version)
                    self.withdrawn.add(version)
                    self.restore = self.served
                    details = {"version": version, "reason": refused, "served": self.served}
                    await self.note("promotion", "canary", "refuse", "refused", details)
                    return False
                await self._promote(version, "canary" if decision else "learner", scores, forced=False)
                self.base = version
                return True
        finally:
            self.candidate = None

    async def _judge(self, version: int) -> tuple[Decision, Scores]:
        """Compare a version with the promotion history on the canary, then with the served one on traffic."""
        canary, served, settings = self.canary, self.served, self.settings
        assert canary is not None
        if self.history is None:
            self.history = PromotionHistory(settings, served, await canary.judge(served))
        scores = await canary.judge(version)
        decision, on_traffic = self.history.judge_candidate(scores), None
        if decision.promote and settings.min_use is not None and canary.use < settings.min_use:
            decision = replace(decision, promote=False, reason="does_not_look")
        items = self.traffic.items if self.traffic is not None else []
        if decision.promote and len(items) >= MIN_QUESTIONS:
            served = self.served
            of_version = await canary.judge_traffic(version, items)
            of_served = await canary.judge_traffic(served, items)
            on_traffic = judge_traffic(of_version, of_served, settings, served)
            details = {"version": version, **asdict(on_traffic)}
            result = "refused" if on_traffic.fell else "success"
            await self.note("canary", "canary", "judge_traffic", result, details)
            if on_traffic.fell:
                decision = replace(decision, promote=False, reason="traffic_fell_significantly")
        outcome = "promote" if decision.promote else "wait" if decision.waits else "refuse"
        await self._record_judgement(version, decision, outcome, on_traffic)
        return decision, scores

    async def _record_judgement(
        self, version: int, decision: Decision, outcome: str, on_traffic: Decision | None = None
    ) -> None:
        details: dict[str, Any] = {"version": version, "decision": outcome, **asdict(decision)}
        traffic = None if on_traffic is None else asdict(on_traffic)
        self.curve = [*self.curve[1 - MAX_CURVE :], {"time": time.time(), **details, "traffic": traffic}]
        self._save()
        action = "watch" if outcome in ("keep", "roll_back") else "judge"
        result = {"refuse": "refused", "roll_back": "refused", "wait": "skipped"}.get(outcome, "success")
        await self.note("canary", "canary", action, result, details)

    # -- orders

    async def promote(self, version: int, by: str, force: bool = False) -> dict[str, Any]:
        """Serve ``version`` on a person's order unless the canary refuses it; ``force``: without the canary.

        Raises BadInput for the served version, MissingFile for an unknown version or missing weights.
        """
        if version == self.served:
            raise BadInput(f"version {version} is served already", code="serves_already")
        await self._record(version)
        await self.store.get.remote(version)
        decision, scores = None, None
        if self.canary is not None and not force:
            decision, scores = await self._judge(version)
            if not decision.promote:
                details = {"version": version, "reason": decision.reason, "served": self.served}
                await self.note("promotion", by, "promote", "refused", details)
                return {"promoted": False, **asdict(decision)}
        async with self.transition:
            await self._promote(version, by, scores, forced=force)
            self.restore = version
        return {"promoted": True, "version": version, **(asdict(decision) if decision else {"forced": force})}

    async def _promote(self, version: int, by: str, scores: Scores | None, forced: bool) -> None:
        before = self.served
        self._save(pending={"version": version, "scores": None if scores is None else dict(scores)})
        await self.store.promote.remote(version)
        try:
            await self._serve(version)
        except BadInput:
            await self.store.roll_back.remote(version)
            await self._serve(await self.store.promoted.remote())
            raise
        self._record_promotion(before, version, scores)
        self._save()
        details = {"version": version, "before": before, "forced": forced}
        await self.note("promotion", by, "promote", "success", details)

    def _record_promotion(self, before: int, version: int, scores: Scores | None) -> None:
        if self.history is not None:
            if version < before:
                self.history.roll_back(version)
            else:
                self.history.promote(version, scores)
        self.unjudged = scores is None

    async def roll_back(self, version: int | None, by: str, reason: str) -> int:
        """Serve ``version`` again (None: the one promoted before), withdraw later ones; returns the version.

        Raises BadInput if there is no earlier version, MissingFile without its weights.
        """
        async with self.transition:
            return await self._roll_back(version, by, reason)

    async def _roll_back(self, version: int | None, by: str, reason: str) -> int:
        before = self.served
        if version is None:
            await self.store.roll_back.remote(before)
            target = await self.store.promoted.remote()
        else:
            record = await self._record(version)
            if version >= before or record.status is not VersionStatus.PROMOTED:
                raise BadInput(
                    f"version {version} was not promoted before the served version {before}",
                    code="no_version",
                    fix="name a promoted version, or promote this one",
                )
            await self.store.promote.remote(version)
            target = version
        await self._serve(target)
        self.restore = target
        self.rollbacks += 1
        if self.history is not None:
            self.history.roll_back(target)
        self.unjudged = False
        self._save()
        details = {"version": target, "before": before, "reason": reason}
        await self.note("rollback", by, "roll_back", "success", details)
        return target

    async def check_served(self, by: str = "watch") -> bool:
        if self.canary is None:
            return False
        version = self.served
        try:
            if self.history is None and self.unjudged:  # forced before there was a version to compare with
                parent = (await self._record(version)).parent or 0
                self.history = PromotionHistory(self.settings, parent, await self.canary.judge(parent))
                self.history.promote(version)
            scores = await self.canary.judge(version)
        except (PixelisError, RayError) as error:
            await self.note("canary", "canary", "watch", "failure", {"version": version, "cause": str(error)})
            return False
        # A promotion under way ends first: what it serves then was not judged here
        async with self.transition:
            if version != self.served:
                return False
            if self.history is None:
                self.history = PromotionHistory(self.settings, version, scores)
            decision = self.history.judge_served(scores)
            fell = decision.fell and version > 0
            await self._record_judgement(version, decision, "roll_back" if fell else "keep")
            if fell:
                await self._roll_back(None, by, decision.reason)
            elif self.unjudged:
                self.history.promote(version, scores)
                self.unjudged = False
                self._save()
            return fell

    async def was_promoted(self, version: int) -> bool:
        return (await self._record(version)).status is VersionStatus.PROMOTED

    async def unlearn(self, versions: Sequence[int]) -> None:
        """Remove the weights of versions that must not be served again."""
        async with self.transition:
            await self.store.unlearn.remote(list(versions))
            self.withdrawn -= set(versions)

    # -- state

    async def use_generators(self, names: Sequence[str]) -> None:
        if list(names) != self.generators:
            self.router.set_members([await asyncio.to_thread(actor_handle, name) for name in names])
            self.generators = list(names)

    async def _serve(self, version: int) -> None:
        await self.router.load(version)
        records = await self.store.list.remote()
        self.served = version
        self.withdrawn = {v.version for v in records if v.status is VersionStatus.ROLLED_BACK}
        hashes = {v.version: v.sha256 for v in records}
        self.key = [
            self.settings.questions,
            self.settings.count,
            hashes.get(0, ""),
            version,
            hashes.get(version, ""),
        ]

    async def _record(self, version: int) -> PolicyVersion:
        record = next((v for v in await self.store.list.remote() if v.version == version), None)
        if record is None:
            fix = "take one from the list of versions"
            raise MissingFile(f"no policy version {version}", code="unknown_version", fix=fix)
        return record

    def _save(self, pending: dict[str, Any] | None = None) -> None:
        """Write the state; a restart completes a promotion that is ``pending``."""
        state = {"key": self.key, "unjudged": self.unjudged, "curve": self.curve, "pending": pending}
        write_json(self.file, {**state, "watch": self.history and self.history.state()})

    async def _restore(self) -> None:
        """Load the saved state. Without it the watch judges the served version anew, beside the one before."""
        cause = f"there is no {self.file}"
        try:
            with damaged_file(self.file, "nothing: versions are judged anew"):
                if self._load():
                    return
        except BadInput as error:
            cause = error.message
            os.replace(self.file, self.file.with_suffix(".damaged"))
        if self.served and self.canary is not None:
            self.unjudged = True
            await self.note("repair", "evolution", "judge_anew", "success", {"cause": cause})

    def _load(self) -> bool:
        """Load the saved state if it is about these questions and this starting policy and served version.

        False without a file.
        """
        if not self.file.is_file():
            return False
        state = json.loads(self.file.read_bytes())
        if state["key"][:3] != self.key[:3]:
            return True
        history = state["watch"] and PromotionHistory.restore(self.settings, state["watch"])
        current, pending = state["key"] == self.key, state["pending"] or {}
        completed = pending.get("version") == self.served
        if current or completed or (history and self.served in dict(history.entries)):
            self.history, self.curve, self.unjudged = history, state["curve"], state["unjudged"]
            if not current and completed:
                self._record_promotion(state["key"][3], self.served, pending["scores"])
            elif not current and history:  # a rollback that was not saved
                history.roll_back(self.served)
                self.unjudged = False
        return True
