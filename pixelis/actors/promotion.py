"""Promotes policy versions: candidate, canary, promotion, rollback. What serves has passed, or a person has forced it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.canary import Canary
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.generator_router import GeneratorRouter
from pixelis.config import Config
from pixelis.errors import BadInput, MissingFile, PixelisError
from pixelis.evolution.canary import Decision, Scores, Watch
from pixelis.policy.checkpoint import write_json
from pixelis.records import PolicyVersion, VersionStatus

CURVE = 1000
"""Judgements kept for the canary curve."""

Note = Callable[[str, str, str, str, dict[str, Any]], Awaitable[None]]
"""Writes an audit event: event, actor, action, result, details."""


class Promotion:
    """Decides which version serves. One transition at a time; judging, which takes long, blocks none.

    ``restore`` is the version that the learner has to go back to before its next step, None when its weights come from what is
    promoted; ``base`` says from which version they come. Without a canary every candidate is promoted.
    """

    def __init__(self, config: Config, store: ActorHandle, router: GeneratorRouter, canary: Canary | None, note: Note):
        self.config, self.store, self.router, self.canary, self.note = config, store, router, canary, note
        self.served = 0
        self.candidate: int | None = None
        self.restore: int | None = None
        self.base: int | None = None
        self.withdrawn: set[int] = set()
        self.rollbacks = 0
        self.watch: Watch | None = None
        self.unjudged = False
        """True after a forced promotion, until the watch has looked."""
        self.curve: list[dict[str, Any]] = []
        self.key: list[Any] = []
        """Questions, starting policy and served version: what the kept answers are about."""
        self.transition = asyncio.Lock()
        self.file = Path(config.run.dir) / "versions" / "canary.json"

    async def open(self) -> None:
        """Serve what is promoted and take up what an earlier life of this service knew. Raises what ``Canary.ready`` does."""
        if self.canary is not None:
            await self.canary.ready()
        async with self.transition:
            await self._serve(await self.store.promoted.remote())
            self._recall()

    async def begin(self, base: int | None) -> None:
        """The learner starts with weights that come from version ``base``; anything but what is promoted sends it back."""
        async with self.transition:
            promoted = await self.store.promoted.remote()
            if promoted != self.served:
                await self._serve(promoted)
            self.base, self.restore = base, None if base == promoted else promoted

    def took_up(self, version: int | None) -> None:
        """The learner has made a step from the weights of ``version`` (None: from those it had)."""
        if version is not None:
            self.base = version
            if self.restore == version:
                self.restore = None

    # -- candidates -------------------------------------------------------------------------------------------------

    async def offer(self, version: int) -> bool:
        """Judge a candidate of the learner and promote or refuse it; True when it serves now.

        When the canary cannot be asked it stays a candidate, which serves nobody, and the learner goes on.
        """
        record = await self._record(version)
        if record.status is not VersionStatus.CANDIDATE:
            return version == self.served
        about = {"version": version, "parent": record.parent, "sha256": record.sha256, "step": record.step}
        await self.note("candidate", "learner", "publish", "success", about)
        self.candidate = version
        try:
            before, decision, scores, refused = self.served, None, None, ""
            if self.canary is not None and self.restore is None:
                try:
                    decision, scores = await self._judge(version)
                except BadInput as error:  # weights that no engine takes
                    refused = error.code
                except (PixelisError, RayError) as error:
                    await self.note("canary", "canary", "judge", "failure", {"version": version, "cause": str(error)})
                    return False
            async with self.transition:
                if self.restore is not None or self.served != before:
                    refused = "made from withdrawn weights"
                elif decision is not None and not decision.promote:
                    refused = decision.reason
                if refused:
                    await self._refuse(version, refused)
                    return False
                await self._promote(version, "canary" if decision else "learner", scores, forced=False)
                self.base = version
                return True
        finally:
            self.candidate = None

    async def _refuse(self, version: int, reason: str) -> None:
        """Nobody will serve it, and the learner does not go on from it."""
        await self.store.roll_back.remote(version)
        self.withdrawn.add(version)
        self.restore = self.served
        await self.note("promotion", "canary", "refuse", "refused", {"version": version, "reason": reason, "served": self.served})

    async def _judge(self, version: int) -> tuple[Decision, Scores]:
        """What the canary says of a version in comparison with what served so far."""
        assert self.canary is not None
        try:
            if self.watch is None:
                served = self.served
                self.watch = Watch(self.config.evolution.canary, served, await self.canary.judge(served))
            scores = await self.canary.judge(version)
        except RayError as error:
            raise unwrap_ray_error(error) or error from error
        decision = self.watch.judge(scores)
        await self._judged(version, decision, "promote" if decision.promote else "refuse")
        return decision, scores

    async def _judged(self, version: int, decision: Decision, word: str) -> None:
        entry = {"version": version, "time": time.time(), "decision": word, **asdict(decision)}
        self.curve = [*self.curve[1 - CURVE :], entry]
        self._remember()
        result = "refused" if word in ("refuse", "roll_back") else "success"
        details = {key: value for key, value in entry.items() if key != "time"}
        await self.note("canary", "canary", "watch" if word in ("keep", "roll_back") else "judge", result, details)

    # -- orders -----------------------------------------------------------------------------------------------------

    async def promote(self, version: int, by: str, force: bool = False) -> dict[str, Any]:
        """Serve ``version`` on somebody's word: through the canary, or past it with ``force``. The learner goes on from there.

        Raises BadInput for the version that serves already, MissingFile for an unknown one or one without weights.
        """
        if version == self.served:
            raise BadInput(f"version {version} serves already", code="serves_already")
        await self._record(version)
        await self.store.get.remote(version)
        decision, scores = None, None
        if self.canary is not None and not force:
            decision, scores = await self._judge(version)
            if not decision.promote:
                told = {"version": version, "reason": decision.reason, "served": self.served}
                await self.note("promotion", by, "promote", "refused", told)
                return {"promoted": False, **asdict(decision)}
        async with self.transition:
            await self._promote(version, by, scores, forced=force)
            self.restore = version
        return {"promoted": True, "version": version, **(asdict(decision) if decision else {"forced": force})}

    async def _promote(self, version: int, by: str, scores: Scores | None, forced: bool) -> None:
        before = self.served
        self._remember({"version": version, "scores": None if scores is None else dict(scores)})
        await self.store.promote.remote(version)
        try:
            await self._serve(version)
        except BadInput:
            await self.store.roll_back.remote(version)
            await self._serve(await self.store.promoted.remote())
            raise
        self._moved(before, version, scores)
        self._remember()
        await self.note("promotion", by, "promote", "success", {"version": version, "before": before, "forced": forced})

    def _moved(self, before: int, version: int, scores: Scores | None) -> None:
        if self.watch is not None:
            if version < before:
                self.watch.rolled_back(version)
            else:
                self.watch.promoted(version, scores)
        self.unjudged = scores is None

    async def roll_back(self, version: int | None, by: str, reason: str) -> int:
        """Serve ``version`` again, or the one promoted before the served one; all that was promoted after it is withdrawn.

        Returns the version that serves now. BadInput when there is none to go back to, MissingFile when its weights are gone.
        """
        async with self.transition:
            before = self.served
            if version is None:
                await self.store.roll_back.remote(before)
                target = await self.store.promoted.remote()
            else:
                record = await self._record(version)
                if version >= before or record.status is not VersionStatus.PROMOTED:
                    raise BadInput(
                        f"version {version} was not promoted before {before}, which serves",
                        code="no_version",
                        fix="name a promoted version, or promote this one",
                    )
                await self.store.promote.remote(version)
                target = version
            await self._serve(target)
            self.restore = target
            self.rollbacks += 1
            if self.watch is not None:
                self.watch.rolled_back(target)
            self.unjudged = False
            self._remember()
            await self.note("rollback", by, "roll_back", "success", {"version": target, "before": before, "reason": reason})
            return target

    async def look(self, by: str = "watch") -> bool:
        """Judge the version that serves once more; True when it fell and its predecessor serves again."""
        if self.canary is None:
            return False
        version = self.served
        try:
            if self.watch is None and self.unjudged:  # forced before there was anything to compare with
                parent = (await self._record(version)).parent or 0
                self.watch = Watch(self.config.evolution.canary, parent, await self.canary.judge(parent))
                self.watch.promoted(version)
            scores = await self.canary.judge(version)
        except (PixelisError, RayError) as error:
            cause = unwrap_ray_error(error) or error
            await self.note("canary", "canary", "watch", "failure", {"version": version, "cause": str(cause)})
            return False
        if version != self.served:
            return False  # it has gone in between
        if self.watch is None:
            self.watch = Watch(self.config.evolution.canary, version, scores)
        decision = self.watch.fell(scores)
        fell = decision.fell and version > 0
        await self._judged(version, decision, "roll_back" if fell else "keep")
        if fell:
            await self.roll_back(None, by, decision.reason)
        elif self.unjudged:
            self.watch.promoted(version, scores)
            self.unjudged = False
            self._remember()
        return fell

    # -- what is known ----------------------------------------------------------------------------------------------

    async def _serve(self, version: int) -> None:
        """Every generator loads ``version``, between its episodes; one that cannot is not used until it has."""
        await self.router.load(version)
        records = await self._records()
        self.served = version
        self.withdrawn = {v.version for v in records if v.status is VersionStatus.ROLLED_BACK}
        hashes = {v.version: v.sha256 for v in records}
        c = self.config.evolution.canary
        self.key = [c.questions, c.count, hashes.get(0, ""), version, hashes.get(version, "")]

    async def _records(self) -> list[PolicyVersion]:
        return await self.store.list.remote()

    async def _record(self, version: int) -> PolicyVersion:
        result = next((v for v in await self._records() if v.version == version), None)
        if result is None:
            raise MissingFile(f"no policy version {version}", code="unknown_version", fix="take one from the list of versions")
        return result

    def _remember(self, coming: dict[str, Any] | None = None) -> None:
        """``coming`` is about to be promoted: a life that ends in between is gone on with as if it had got there."""
        state = self.watch.state() if self.watch is not None else None
        kept = {"key": self.key, "watch": state, "unjudged": self.unjudged, "curve": self.curve, "coming": coming}
        write_json(self.file, kept)

    def _recall(self) -> None:
        """Take up the watch. Other questions, another starting policy or one that it has not heard of make a new beginning."""
        if not self.file.is_file():
            return
        kept = json.loads(self.file.read_text(encoding="utf-8"))
        if kept["key"][:3] != self.key[:3]:
            return
        watch = Watch.restore(self.config.evolution.canary, kept["watch"]) if kept["watch"] is not None else None
        known, coming = kept["key"] == self.key, kept.get("coming") or {}
        promoted = coming.get("version") == self.served
        if known or promoted or (watch is not None and self.served in (version for version, _ in watch.line)):
            self.watch, self.curve, self.unjudged = watch, kept["curve"], kept["unjudged"]
            if not known and promoted:
                self._moved(kept["key"][3], self.served, coming["scores"])
            elif not known and watch is not None:  # withdrawn, but not yet written down
                watch.rolled_back(self.served)
                self.unjudged = False
