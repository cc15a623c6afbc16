"""What the service, its memory and its evolution are told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.parts import Sampling
from pixelis.config.section import Section


class Serve(Section):
    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs an API key")
    port: int = Field(8000, ge=1, le=65535, description="port of the HTTP gateway")
    api_key_env: str = Field("PIXELIS_API_KEY", description="environment variable that holds the API key")
    samples: int = Field(8, ge=1, description="k: samples of a request that vote")
    sampling: Sampling = Field(Sampling(temperature=1.0), description="how the votes are drawn")
    max_body_bytes: int = Field(16_000_000, ge=1024, description="largest request body")
    max_question_chars: int = Field(4000, ge=1, description="longest question")
    max_queue: int | None = Field(
        None, ge=1, description="requests waiting in a replica before it answers 429; unset: as many as run"
    )
    timeout_s: float = Field(60.0, gt=0, description="seconds a request may take; then its rollouts are cancelled")
    replicas: int = Field(1, ge=1, description="gateway replicas at least")
    max_replicas: int | None = Field(
        None, ge=1, description="gateway replicas at most: Serve scales by the load; none: always `replicas`"
    )
    per_minute: int = Field(0, ge=0, description="requests of one client in a minute, in each replica; 0 is no limit")
    per_hour: int = Field(0, ge=0, description="requests of one client in an hour, in each replica; 0 is no limit")
    proxies: int = Field(
        0, ge=0, description="reverse proxies in front; that many last entries of X-Forwarded-For are believed for rate limits"
    )
    cache: int = Field(
        1000, ge=0, description="replies kept by each replica for requests that repeat (seeded or greedy); 0 is none"
    )
    cache_ttl_s: float = Field(3600.0, gt=0, description="seconds a kept reply may be given again")
    read_only: bool = Field(False, description="answer only: no memory, no update, no feedback, no review, nothing written")
    page: bool = Field(True, description="serve the web page at /")

    @model_validator(mode="after")
    def _ordered(self) -> Serve:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"serve.max_replicas {self.max_replicas} is below serve.replicas {self.replicas}")
        return self


class Memory(Section):
    enabled: bool = Field(True, description="keep served experiences")
    dir: str | None = Field(None, description="folder of the shards; none: run.dir/memory")
    shards: int = Field(1, ge=1, description="shard actors; experiences are spread by the hash of their id")
    cpus: float = Field(0.1, ge=0, description="CPUs that each shard reserves")
    capacity: int = Field(10_000, ge=1, description="experiences kept in all shards together")
    evict: Literal["fifo", "priority"] = Field(
        "fifo", description="what makes room when full: the oldest, or the lowest priority"
    )
    retention_days: float = Field(90.0, gt=0, description="age at which an experience is pruned")
    pictures: bool = Field(True, description="keep what the policy saw (PNG without metadata) beside the record")
    index: Literal["flat", "hnsw", "ivf"] = Field("flat", description="FAISS index: exact, graph, or inverted lists")
    metric: Literal["cosine", "euclidean", "manhattan"] = Field("cosine", description="how vectors are compared")
    visual: float = Field(0.7, ge=0, le=1, description="weight of the picture in an experience's vector")
    text: float = Field(0.3, ge=0, le=1, description="weight of the question in an experience's vector")
    hnsw_links: int = Field(32, ge=2, description="hnsw: links of a node")
    hnsw_build: int = Field(200, ge=1, description="hnsw: candidates while building")
    hnsw_search: int = Field(100, ge=1, description="hnsw: candidates while searching")
    ivf_lists: int = Field(100, ge=1, description="ivf: lists")
    ivf_probes: int = Field(10, ge=1, description="ivf: lists looked at")
    timeout_s: float = Field(0.2, gt=0, description="seconds a shard has for a search; a later one makes the result partial")

    @model_validator(mode="after")
    def _weighted(self) -> Memory:
        if self.visual + self.text <= 0:
            raise ValueError("memory.visual and memory.text are both 0: a vector would be nothing")
        return self


class Voting(Section):
    strategy: Literal["majority", "weighted", "confidence", "ensemble"] = Field(
        "majority",
        description="majority: share of all samples (TTRL); weighted: by confidence, similarity, success, age; confidence: the "
        "best single vote; ensemble: these three vote",
    )
    min_votes: int = Field(3, ge=1, description="votes below which agreement is no evidence")
    abstain: float = Field(0.0, ge=0, le=1, description="share of the votes below which there is no answer")
    collapse: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="updates stop when all answers but the most common win at most this times as often as they did; 0 is never",
    )
    collapse_window: int = Field(64, ge=16, description="requests that are compared for that: the first ones, and the last")


class Neighbours(Section):
    k: int = Field(5, ge=0, description="neighbours looked up in memory; 0 is none")
    min_similarity: float = Field(0.95, ge=-1, le=1, description="cosine below which a neighbour has no vote")
    half_life_hours: float = Field(24.0, gt=0, description="age at which a neighbour's weight has fallen to 1/e")


class Guard(Section):
    mode: Literal["auto", "fixed"] = Field("auto", description="auto: beta follows the measured KL; fixed: it stays")
    beta: float = Field(0.01, ge=0, description="weight of the k3 KL term to the starting policy, at first")
    min_beta: float = Field(1e-4, gt=0, description="auto: least beta")
    max_beta: float = Field(1.0, gt=0, description="auto: largest beta")
    target: float = Field(0.05, gt=0, description="KL that beta steers to; an update that would pass twice this is skipped")
    tolerance: float = Field(0.01, ge=0, description="distance from the target within which beta stays")

    @model_validator(mode="after")
    def _ordered(self) -> Guard:
        if self.min_beta > self.max_beta:
            raise ValueError(f"min_beta {self.min_beta} is above max_beta {self.max_beta}")
        return self


class Canary(Section):
    enabled: bool = Field(True, description="judge every candidate before it may serve")
    questions: str = Field("cards:?split=validation&seed=11", description="labelled questions a candidate must not fall on")
    count: int = Field(128, ge=2, description="questions asked")
    every: int = Field(4, ge=1, description="updates between candidates")
    tolerance: float = Field(0.02, ge=0, le=1, description="fall of accuracy that is no reason to refuse")
    sigma: float = Field(2.0, gt=0, description="a fall beyond this many standard errors of the paired difference is one, too")
    watch_s: float = Field(300.0, gt=0, description="seconds between looks at the served version; a fall rolls it back")
    timeout_s: float = Field(300.0, gt=0, description="seconds a question may take, restarts of the generator included")
    cpus: float = Field(0.25, ge=0, description="CPUs of the generator that answers the canary questions")
    gpus: float = Field(0, ge=0, description="GPUs of the generator that answers the canary questions")


class Review(Section):
    share: float = Field(0.0, ge=0, le=1, description="share of gated updates that wait for a person (the paper's is .02)")
    approve_after_s: float | None = Field(None, gt=0, description="seconds after which a waiting update is taken; none: never")
    limit: int = Field(1000, ge=1, description="most updates that wait; more go their automatic way")


class Audit(Section):
    rotate_bytes: int = Field(
        100_000_000, ge=1000, description="size at which a log file is closed, compressed and followed by another"
    )
    retention_days: float = Field(365.0, gt=0, description="age at which a closed log file is removed")


class Threshold(Section):
    metric: str = Field(
        description="health metric, such as update_rate, faiss_failure_rate, mean_kl, queue_size, memory_usage, p99_latency"
    )
    over: float | None = Field(None, description="alert above")
    at_most: float | None = Field(None, description="alert at or below")
    severity: Literal["info", "warning", "critical"] = Field("warning", description="how loud")
    cooldown_s: float = Field(300.0, ge=0, description="seconds in which the same alert is not repeated")

    @model_validator(mode="after")
    def _one_side(self) -> Threshold:
        if (self.over is None) == (self.at_most is None):
            raise ValueError("a threshold has either `over` or `at_most`")
        return self


class Alerts(Section):
    webhook_env: str = Field(
        "PIXELIS_ALERT_WEBHOOK", description="environment variable with the URL that alerts are posted to; unset: none"
    )
    every_s: float = Field(10.0, gt=0, description="seconds between looks at the health metrics")
    extra: list[Threshold] = Field([], description="thresholds beside the built-in ones")


class Evolution(Section):
    enabled: bool = Field(True, description="learn from served traffic")
    cold_start: int = Field(100, ge=0, description="experiences in memory before neighbours are asked and updates made")
    vote: Voting = Voting()
    neighbours: Neighbours = Neighbours()
    gate: float = Field(0.7, ge=0, le=1, description="least confidence (inclusive) of a verdict that becomes an update")
    batch: int = Field(16, ge=1, description="update tasks in one optimizer step")
    queue: int = Field(256, ge=1, description="update tasks that wait; the oldest is dropped beyond")
    per_minute: float = Field(60.0, gt=0, description="most updates in a minute")
    objective: Literal["answer", "policy"] = Field(
        "policy",
        description="policy: rft.loss with group advantages (TTRL); answer: the elected answer is learnt in every sample's own "
        "episode, and the calls of the samples that gave it with weight call_weight",
    )
    call_weight: float = Field(
        0.1, ge=0, description="objective=answer: weight of the tokens before the last turn where it agreed"
    )
    lr: float = Field(3e-4, gt=0, description="largest learning rate of online updates")
    lr_min: float = Field(1e-6, gt=0, description="least learning rate of online updates")
    lr_by: Literal["fixed", "confidence"] = Field(
        "fixed", description="fixed: lr; confidence: lr x (1 - mean confidence of the batch)"
    )
    ema: float = Field(0.0, ge=0, lt=1, description="decay of the average of adapters that is served; 0 serves the newest")
    guard: Guard = Guard()
    canary: Canary = Canary()
    review: Review = Review()
    audit: Audit = Audit()
    alerts: Alerts = Alerts()

    @model_validator(mode="after")
    def _ordered(self) -> Evolution:
        if self.lr_min > self.lr:
            raise ValueError(f"evolution.lr_min {self.lr_min} is above evolution.lr {self.lr}")
        return self
