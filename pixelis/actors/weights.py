"""Publishes the learner's weights as versions: through the PolicyStore, or whole models in a broadcast."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from pixelis.errors import InfraFailure
from pixelis.telemetry import events
from pixelis.telemetry.events import EventLog

if TYPE_CHECKING:
    from pixelis.config import Config
    from pixelis.policy.adapters import Adapter
    from pixelis.policy.train_step import Trainer
    from pixelis.policy.weight_stream import StreamPlace, WeightSender


class WeightPublisher:
    """Publishes every ``every``-th batch's weights to a PolicyStore, if there is one.

    With ``promote`` false, versions are candidates: they are not served before their promotion.
    """

    def __init__(self, store: ActorHandle | None, stage: str, every: int = 1, promote: bool = True):
        self.store, self.stage, self.every, self.promote = store, stage, every, promote
        self.storing: ray.ObjectRef | None = None

    def due(self, trainer: Trainer, metrics: dict[str, float]) -> bool:
        return trainer.batches % self.every == 0

    def publish(
        self, trainer: Trainer, metrics: dict[str, float], restart: bool = False
    ) -> ray.ObjectRef | None:
        """Publish if due; returns a reference to the version number on the first worker, otherwise None.

        ``restart``: the learner starts here, so later versions are withdrawn.
        """
        if self.store is None or not (restart or self.due(trainer, metrics)):
            return None
        weights = trainer.served()
        if not trainer.is_first:
            return None
        self.close()
        # What is judged or returned to must be on disk
        later, weights = self.promote and not restart, ray.put(weights)
        details = self.stage, trainer.batches, metrics, self.promote, restart, later
        version = self.store.publish.remote(weights, *details)
        self.storing = self.store.keep.remote(version, weights) if later else None
        return version

    def close(self) -> None:
        """Wait until the last version is stored. Raises what prevented it."""
        if self.storing is not None:
            ray.get(self.storing)


class StreamPublisher(WeightPublisher):
    """Publishes whole models: the generators receive them in a broadcast, the store keeps them afterwards.

    A version that is not broadcast, because a process failed or nobody asked in time, is loaded from the
    store.
    """

    def __init__(self, config: Config, store: ActorHandle, stage: str):
        super().__init__(store, stage)
        self.settings, self.run_dir = config.policy_store, config.run.dir
        self.sender: WeightSender | None = None
        self.thread: threading.Thread | None = None
        self.version: int | None = None
        self.error: BaseException | None = None

    def publish(
        self, trainer: Trainer, metrics: dict[str, float], restart: bool = False
    ) -> ray.ObjectRef | None:
        if restart or self.store is None or not self.due(trainer, metrics):
            return super().publish(trainer, metrics, restart)
        weights = trainer.served()
        if not trainer.is_first:
            return None
        if self.sender is None:
            from pixelis.policy.weight_stream import WeightSender

            address, backend = ray.util.get_node_ip_address(), self.settings.transfer
            self.sender = WeightSender(address, backend, self.settings.transfer_timeout_s)  # type: ignore[arg-type]
        elif self.version is not None:
            self.sender.give_up(self.version)
        self.close()
        details = self.stage, trainer.batches, metrics, self.promote, self.sender.address
        version = self.store.announce.remote((weights.sha256(), weights.nbytes), *details)
        self.version = ray.get(version)
        arguments = self.sender, self.version, weights
        self.thread = threading.Thread(target=self._send, args=arguments, name="weights", daemon=True)
        self.thread.start()
        return version

    def _send(self, sender: WeightSender, version: int, weights: Adapter) -> None:
        assert self.store is not None
        try:
            if ray.get(self.store.stream_of.remote(version)) is None:
                return  # an older version with equal weights
            with EventLog(self.run_dir) as log:
                try:
                    if (sent := sender.send(version, weights))["receivers"]:
                        log.write(events.STREAMED, version=version, **sent)
                except InfraFailure as error:
                    log.write(events.NOTICE, text=f"{error}: the generators load it from the policy store")
            ray.get(self.store.keep.remote(version, weights))
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        """Wait until the last version is stored. Raises what prevented it."""
        if self.thread is not None:
            self.thread.join()
        self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def publisher_for(config: Config, store: ActorHandle, stage: str) -> WeightPublisher:
    streams = config.policy_store.streams
    return StreamPublisher(config, store, stage) if streams else WeightPublisher(store, stage)


async def arrange_stream(
    store: ActorHandle, version: int, receivers: Sequence[str]
) -> dict[str, StreamPlace]:
    """Place of each receiver in the broadcast of a version; {} for one to be loaded from the store."""
    from pixelis.policy.weight_stream import StreamPlace, request

    address = await store.stream_of.remote(version)
    if address is None:
        return {}
    group, size = uuid.uuid4().hex, len(receivers) + 1
    if not await asyncio.to_thread(request, address, version, group, size):
        return {}
    return {name: StreamPlace(address, group, rank, size) for rank, name in enumerate(receivers, 1)}


class CandidatePublisher(WeightPublisher):
    """Publishes a candidate after every ``every``-th update that was not skipped."""

    def __init__(self, store: ActorHandle, every: int):
        super().__init__(store, "evolve", every, promote=False)
        self.unpublished = 0
        self.ordered: bool | None = None
        """Whether to publish the next update, None: if it is due."""

    def due(self, trainer: Trainer, metrics: dict[str, float]) -> bool:
        """Also after a skipped update: those before it have used up the allowed KL to the served policy."""
        if self.ordered is not None:
            self.unpublished = 0
            return self.ordered
        skipped = bool(metrics.get("evolve/skipped"))
        self.unpublished += not skipped
        is_due = self.unpublished >= self.every or (skipped and self.unpublished > 0)
        if is_due:
            self.unpublished = 0
        return is_due
