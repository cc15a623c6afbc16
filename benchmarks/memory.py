"""The experience memory against plain FAISS and plain SQLite, and its content after kill -9.

    OMP_NUM_THREADS=1 python -m benchmarks.memory [--part search recall recover add kill] [--records 100000]
    [--kills 20]

``search``: batches of 64 queries and single queries through shard actors and the client, alternating with one
FAISS call in this process with the same threads; all ids are compared with brute force. ``recall``: HNSW in a
shard against brute force, on vectors with as many main directions as embeddings have, and on noise.
``recover``: opening a shard up to its first search, after a clean end and after kill -9, against FAISS
reading its own file. ``add``: durable adds in batches and from concurrent callers, alternating with plain
SQLite with as many syncs. ``kill``: a child process adds and is killed at random moments; every acknowledged
record is then looked up in the database and the index.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import shutil
import signal
import sqlite3
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from benchmarks.harness import Report, compare, parse_args, percentile, time_call
from pixelis.config import MemoryConfig, load
from pixelis.memory import Entry, Shard, index
from pixelis.records import Experience, ImageView, Question, Trajectory, Turn, Verdict, Vote

K, BATCH = 32, 64
PARTS = ("search", "recall", "recover", "add", "kill")


def like_embeddings(count: int, width: int, seed: int) -> np.ndarray:
    """Return float32 unit vectors [count, width] with 32 main directions, in a thousand loose clusters."""
    rng, world = np.random.default_rng(seed), np.random.default_rng(0)
    directions, centres = world.standard_normal((32, width)), world.standard_normal((1000, 32))
    latent = centres[rng.integers(0, 1000, count)] + 0.7 * rng.standard_normal((count, 32))
    vectors = latent @ directions + 0.3 * rng.standard_normal((count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def noise(count: int, width: int, seed: int) -> np.ndarray:
    """Return isotropic float32 unit vectors [count, width], for which an approximate index has low recall."""
    vectors = np.random.default_rng(seed).standard_normal((count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def experience(number: int) -> Experience:
    """Return an experience with two turns and 300 tokens, about 4 kB as JSON."""
    user = Turn(
        role="user", text="Which digit is in the yellow frame?", tokens=list(range(100, 300)), images=["img0"]
    )
    assistant = Turn(
        role="assistant", text="<answer>7</answer>", tokens=list(range(100)), log_probs=[-0.25] * 100
    )
    return Experience(
        id=f"exp_{number:016x}",
        question=Question(id=f"q{number}", question=user.text),
        trajectory=Trajectory(
            question_id=f"q{number}",
            turns=[user, assistant],
            answer="7",
            images=[ImageView(id="img0", view_size=(64, 64))],
        ),
        verdict=Verdict(
            answer="7",
            confidence=0.875,
            strategy="majority",
            votes=[Vote(answer="7", id=f"t{i}") for i in range(8)],
        ),
        policy_version=3,
        created_at=time.time(),
    )


def filled(folder: Path, config: MemoryConfig, vectors: np.ndarray) -> Shard:
    """Return a new shard with an experience for each vector."""
    shard = Shard(folder, config)
    for start in range(0, len(vectors), 1000):
        part = vectors[start : start + 1000]
        shard.add([Entry(experience(start + i), vector) for i, vector in enumerate(part)])
    return shard


def recall_of(results: list[list[tuple[str, float]]], truth: np.ndarray) -> float:
    """Return the share of the true nearest rows [n, k] among the results."""
    hits = [
        len({int(id[4:], 16) for id, _ in r} & set(t.tolist())) / len(t)
        for r, t in zip(results, truth, strict=True)
    ]
    return float(np.mean(hits))


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of this process and of the given ones (Linux)."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return time.process_time() + sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def search(report: Report, folder: Path, records: int, width: int) -> None:
    """Report searches through one and two shard actors against one call of FAISS."""
    import ray

    vectors, queries = like_embeddings(records, width, 1), like_embeddings(20 * BATCH, width, 2)
    raw = faiss.IndexFlatIP(width)
    raw.add(vectors)
    for shards in (1, 2):
        search_in(report, folder / str(shards), shards, vectors, queries, raw)
    ray.shutdown()


def search_in(
    report: Report, folder: Path, shards: int, vectors: np.ndarray, queries: np.ndarray, raw: Any
) -> None:
    """Report searches through this number of shards. raw: the FAISS index of the same vectors."""
    import ray

    from pixelis.actors.cluster import connect
    from pixelis.actors.memory import Memory as Client
    from pixelis.actors.memory_shard import place_shards

    overrides = [
        "cluster.cpus=4",
        "cluster.object_store_bytes=300000000",
        f"memory.shards={shards}",
        f"run.dir={folder}",
    ]
    overrides += [f"memory.capacity={2 * len(vectors)}", "memory.timeout_s=60", "memory.retention_days=36500"]
    config = load(None, overrides)
    connect(config)
    names, actors = place_shards(config, f"bench-{shards}")
    pids = [h["pid"] for h in ray.get([a.health.remote() for a in actors])]
    client, loop = Client(names, "pixelis", config.memory), asyncio.new_event_loop()
    for start in range(0, len(vectors), 1000):
        part = [Entry(experience(start + i), v) for i, v in enumerate(vectors[start : start + 1000])]
        loop.run_until_complete(client.add(part))

    def nearest(start: int, count: int) -> list[list[tuple[str, float]]]:
        return loop.run_until_complete(client.nearest(queries[start : start + count], K))[0]

    def one_query(start: int) -> tuple[float, float]:
        return time_call(lambda: nearest(start, 1)), time_call(
            lambda: raw.search(queries[start : start + 1], K)
        )

    label = f"{shards} shard(s)"
    report.row(
        f"{label}: ids equal to brute force",
        recall_of(nearest(0, BATCH), raw.search(queries[:BATCH], K)[1]),
        "1",
    )
    ratio = compare(lambda: nearest(0, BATCH), lambda: raw.search(queries[:BATCH], K), repeats=9)
    report.row(f"{label}: {BATCH} queries / raw FAISS", ratio, "<= 1.3")
    cpu = compare(
        lambda: nearest(0, BATCH),
        lambda: raw.search(queries[:BATCH], K),
        repeats=9,
        clock=lambda: cpu_seconds(pids),
    )
    report.row(f"{label}: {BATCH} queries / raw FAISS, CPU time", cpu, "<= 1.3", "client and shards")
    pairs = [one_query(i) for i in range(80)][10:]
    added = [1e3 * (a - b) for a, b in pairs]
    report.row(
        f"{label}: one query, ms more than raw",
        percentile(added, 0.5),
        "<= 3",
        f"p90 {percentile(added, 0.9):.2f}",
    )
    report.row(f"{label}: raw one query, ms", 1e3 * percentile([b for _, b in pairs], 0.5))
    whole = [
        1e3 * time_call(lambda: loop.run_until_complete(client.search(queries[7], 5, track=False)))
        for _ in range(40)
    ]
    report.row(f"{label}: 5 neighbours with their records, ms", percentile(whole[5:], 0.5))
    for actor in actors:
        ray.get(actor.close.remote())
        ray.kill(actor)
    loop.close()


def recall(report: Report, folder: Path, records: int, width: int) -> None:
    """Report the recall of HNSW with the default configuration."""
    for name, make, count in (
        ("like embeddings", like_embeddings, records),
        ("noise", noise, min(records, 20_000)),
    ):
        vectors, queries = make(count, width, 1), make(500, width, 2)
        truth = faiss.IndexFlatIP(width)
        truth.add(vectors)
        exact = truth.search(queries, 10)[1]
        place, graph = folder / name.split()[0], MemoryConfig(index="hnsw", capacity=2 * count)
        filled(place, graph, vectors).close()
        index.MAX_EXACT = count - 1  # so that this number of vectors gets a graph
        start = time.perf_counter()
        shard = Shard(place, graph)
        report.row(f"hnsw, {count} {name}: s to open, with the graph built", time.perf_counter() - start)
        goal = ">= .98" if make is like_embeddings else ""
        report.row(f"hnsw, {count} {name}: recall@10", recall_of(shard.search(queries, 10), exact), goal)
        ratio = compare(lambda: shard.search(queries[:64], 10), lambda: truth.search(queries[:64], 10))  # noqa: B023
        report.row(f"hnsw, {count} {name}: 64 queries / flat FAISS", ratio)
        shard.delete([f"exp_{i:016x}" for i in range(0, count, 10)])
        remaining = np.setdiff1d(np.arange(count), np.arange(0, count, 10))
        exact_remaining = faiss.IndexFlatIP(width)
        exact_remaining.add(vectors[remaining])
        after = recall_of(shard.search(queries, 10), remaining[exact_remaining.search(queries, 10)[1]])
        report.row(f"hnsw, {count} {name}: recall@10 with every tenth deleted", after)
        shard.close()


def fork(function: Callable[[], None]) -> int:
    """Run ``function`` in a forked process; return its id."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return child


def recover(report: Report, folder: Path, records: int, width: int) -> None:
    """Report the time from opening a shard to its first search."""
    vectors, query = like_embeddings(records, width, 1), like_embeddings(1, width, 2)
    filled(folder, MemoryConfig(capacity=2 * records), vectors).close()
    raw = faiss.IndexFlatIP(width)
    raw.add(vectors)
    faiss.write_index(raw, str(folder / "raw.faiss"))
    expected = [f"exp_{i:016x}" for i in raw.search(query, 10)[1][0]]

    def open_shard(config: MemoryConfig) -> int:
        shard = Shard(folder, config)
        assert len(shard) > records or [id for id, _ in shard.search(query, 10)[0]] == expected
        shard.close()
        return len(shard)

    flat = MemoryConfig(capacity=2 * records)
    ratio = compare(
        lambda: open_shard(flat),
        lambda: faiss.read_index(str(folder / "raw.faiss")).search(query, 10),
        repeats=5,
    )
    report.row(f"flat, {records} records: open and search / FAISS reading its file", ratio)
    report.row(f"flat, {records} records: s to open and search", ratio.ours_s, "<= 10")

    def add_forever() -> None:
        shard = Shard(folder, flat)
        for number in range(10**9):
            shard.add(
                [
                    Entry(experience(records + 32 * number + i), vectors[(32 * number + i) % records])
                    for i in range(32)
                ]
            )

    child = fork(add_forever)
    time.sleep(min(10.0, records / 10_000))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    start = time.perf_counter()
    count = open_shard(flat)
    report.row(
        f"flat, {count} records: s to open and search after kill -9", time.perf_counter() - start, "<= 10"
    )


def add(report: Report, folder: Path, records: int, width: int) -> None:
    """Report durable adds against SQLite that stores the same bytes with as many syncs."""
    vectors = like_embeddings(20_000, width, 1)
    shard = Shard(folder / "shard", MemoryConfig(capacity=10**9))
    plain = sqlite3.connect(folder / "plain.sqlite", isolation_level=None)
    plain.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE x (id TEXT UNIQUE, a TEXT, b BLOB)"
    )
    numbers = itertools.count()

    def new_entries(count: int) -> list[Entry]:
        return [Entry(experience(i), vectors[i % 20_000]) for i in itertools.islice(numbers, count)]

    def store_plain(entries: list[Entry]) -> None:
        plain.execute("BEGIN IMMEDIATE")
        rows = [
            (e.experience.id, e.experience.model_dump_json(), np.asarray(e.vector).tobytes()) for e in entries
        ]
        plain.executemany("INSERT INTO x VALUES (?, ?, ?)", rows)
        plain.execute("COMMIT")

    repeats, calls = (7, 10) if records >= 10_000 else (2, 2)
    for size in (1, 64, 1000):
        batches = iter([new_entries(size) for _ in range(2 * (repeats + 1) * calls)])
        ratio = compare(
            lambda: [shard.add(next(batches)) for _ in range(calls)],  # noqa: B023
            lambda: [store_plain(next(batches)) for _ in range(calls)],  # type: ignore[func-returns-value]  # noqa: B023
            repeats,
        )
        report.row(
            f"adds of {size}: shard / plain SQLite", ratio, "", f"{calls * size / ratio.ours_s:.0f} a second"
        )
    pool = ThreadPoolExecutor(16)
    adds = 2 * (repeats + 1) * 160
    batches = iter([new_entries(1) for _ in range(adds)])
    commits = shard.database.commits
    concurrent = compare(
        lambda: list(pool.map(lambda _: shard.add(next(batches)), range(160))),
        lambda: [shard.add(next(batches)) for _ in range(160)],
        repeats,
    )
    note = f"{shard.database.commits - commits} commits of {adds} adds"
    report.row("160 adds by 16 callers / one after the other", concurrent, "< 1", note)
    shard.close()


def kill(report: Report, folder: Path, records: int, width: int, kills: int) -> None:
    """Report the content of a shard after ``kills`` kills of a process that adds from 8 threads.

    The child writes the seconds of opening, as a negative number of ms, and the numbers of acknowledged
    records to a pipe.
    """
    seed = random.randrange(10**6)
    rng, acknowledged = random.Random(seed), []
    limits = [*sorted(rng.sample(range(100, records), kills)), records]
    vectors = like_embeddings(5000, width, 1)
    settings = MemoryConfig(capacity=100 * records)
    opening_s: list[float] = []

    def add_records(number: int, pipe: int) -> None:
        start = time.monotonic()
        shard = Shard(folder, settings)
        os.write(pipe, struct.pack("<q", -1 - int(1e3 * (time.monotonic() - start))))
        batches, lock = itertools.count(number * 10**7, 8), threading.Lock()

        def add_batches() -> None:
            while True:
                with lock:
                    first = next(batches)
                numbers = range(first, first + 8)
                shard.add([Entry(experience(n), vectors[n % 5000]) for n in numbers])
                os.write(pipe, struct.pack("<8q", *numbers))

        threads = [threading.Thread(target=add_batches, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        threads[0].join()

    start = time.monotonic()
    for number, limit in enumerate(limits):
        reading, writing = os.pipe()
        child = fork(lambda: add_records(number, writing))  # noqa: B023
        os.close(writing)
        killed = False
        while content := os.read(reading, 1 << 15):
            while len(content) % 8:
                content += os.read(reading, 8 - len(content) % 8)
            numbers = struct.unpack(f"<{len(content) // 8}q", content)
            opening_s += [(-1 - n) / 1e3 for n in numbers if n < 0]
            acknowledged += [n for n in numbers if n >= 0]
            if len(acknowledged) >= limit and not killed:
                time.sleep(rng.random() * 0.02)
                os.kill(child, signal.SIGKILL)
                killed = True
        os.close(reading)
        os.waitpid(child, 0)
    note = f"{kills} kills and one at the end, {time.monotonic() - start:.0f} s, seed {seed}"
    shard = Shard(folder, settings)
    lost = sum(row is None for row in shard.rows([f"exp_{n:016x}" for n in acknowledged]))
    with shard.database.read() as db:
        stored = dict(db.execute("SELECT id, vector FROM experiences JOIN vectors USING (seq)").fetchall())
        integrity = db.execute("PRAGMA integrity_check").fetchone()[0]
    changed = sum(stored.get(f"exp_{n:016x}") != vectors[n % 5000].tobytes() for n in acknowledged)
    report.row("acknowledged adds", len(acknowledged), f">= {records}", note)
    report.row("acknowledged and lost", lost, "0")
    report.row("vectors that differ from the acknowledged ones", changed, "0")
    report.row(
        "vectors in the index but not in the database, or the reverse",
        abs(shard.stats()["vectors"] - len(stored)),
        "0",
    )
    report.row("SQLite's integrity check", integrity, "ok")
    report.row("s to open after a kill, worst", max(opening_s), "<= 10", f"of {len(opening_s)}")
    shard.close()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dir", help="parent of the working folder, which is deleted at the end")
    args = parse_args(parser, records=1500, width=32, kills=2)
    faiss.omp_set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    report = Report("memory")
    root = Path(tempfile.mkdtemp(prefix="pixelis-memory-", dir=args.dir))
    try:
        # Parts that fork run before Ray starts its threads.
        for part in sorted(args.part, key=["kill", "recover", "recall", "add", "search"].index):
            kills = (args.kills,) if part == "kill" else ()
            globals()[part](report, root / part, args.records, args.width, *kills)
            shutil.rmtree(root / part, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.close()


if __name__ == "__main__":
    main()
