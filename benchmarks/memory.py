"""The experience memory against bare FAISS and bare SQLite, and what kill -9 leaves of it.

    OMP_NUM_THREADS=1 python -m benchmarks.memory [--part search recall recover add kill] [--records 100000] [--kills 20]

``search``: 64 queries at once and one alone through a shard actor and the client, in turns with one FAISS call in this process,
the same threads; all ids compared with brute force. ``recall``: HNSW behind a shard against brute force, on vectors with as many
directions as embeddings have, and on noise without any. ``recover``: opening a shard until its first search, flat and HNSW, after
a clean end and after kill -9, and FAISS reading its own file. ``add``: durable adds in groups and from many callers, in turns
with bare SQLite that syncs as often. ``kill``: adds in a child that is killed at random moments; every acknowledged one is then
looked for in the database and the index.
"""

from __future__ import annotations

import argparse
import asyncio
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
from pixelis.memory import Entry, Shard
from pixelis.records import Experience, ImageView, Question, Trajectory, Turn, Verdict, Vote

K, BATCH = 32, 64
PARTS = ("search", "recall", "recover", "add", "kill")


def like_embeddings(count: int, width: int, seed: int) -> np.ndarray:
    """Float32 unit vectors [count, width] of 32 directions and little else, in a thousand loose clusters."""
    rng, world = np.random.default_rng(seed), np.random.default_rng(0)
    directions, centres = world.standard_normal((32, width)), world.standard_normal((1000, 32))
    latent = centres[rng.integers(0, 1000, count)] + 0.7 * rng.standard_normal((count, 32))
    made = latent @ directions + 0.3 * rng.standard_normal((count, width))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def noise(count: int, width: int, seed: int) -> np.ndarray:
    """Float32 unit vectors [count, width] of all directions alike: no index but a scan finds anything in them."""
    made = np.random.default_rng(seed).standard_normal((count, width))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def experience(number: int) -> Experience:
    """An episode of three turns and 300 tokens, about 4 kB as JSON."""
    asked = Turn(role="user", text="Which digit is in the yellow frame?", tokens=list(range(100, 300)), images=["img0"])
    said = Turn(role="assistant", text="<answer>7</answer>", tokens=list(range(100)), log_probs=[-0.25] * 100)
    return Experience(
        id=f"exp_{number:016x}",
        question=Question(id=f"q{number}", question=asked.text),
        trajectory=Trajectory(
            question_id=f"q{number}", turns=[asked, said], answer="7", images=[ImageView(id="img0", view_size=(64, 64))]
        ),
        verdict=Verdict(
            answer="7", confidence=0.875, strategy="majority", votes=[Vote(answer="7", id=f"t{i}") for i in range(8)]
        ),
        policy_version=3,
        created_at=time.time(),
    )


def filled(folder: Path, config: MemoryConfig, vectors: np.ndarray) -> Shard:
    """A shard with these vectors, in groups of a thousand."""
    shard = Shard(folder, config)
    for start in range(0, len(vectors), 1000):
        part = vectors[start : start + 1000]
        shard.add([Entry(experience(start + i), vector) for i, vector in enumerate(part)])
    return shard


def recalled(found: list[list[tuple[str, float]]], truth: np.ndarray) -> float:
    """Share of the true nearest rows [n, k] among those found."""
    return float(
        np.mean([len({int(id[4:], 16) for id, _ in f} & set(t.tolist())) / len(t) for f, t in zip(found, truth, strict=True)])
    )


def settled(shard: Shard, limit_s: float = 3600) -> float:
    """Seconds until the index has built what waits for it."""
    began = time.monotonic()
    while shard.stats()["waiting_for_index"] >= 1024 and time.monotonic() - began < limit_s:
        time.sleep(0.2)
    return time.monotonic() - began


def cpu_seconds(pids: list[int]) -> float:
    """Processor seconds of this process and of these (Linux)."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return time.process_time() + sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def search(report: Report, folder: Path, records: int, width: int) -> None:
    """Through the actors, against one call of FAISS."""
    import ray

    vectors, queries = like_embeddings(records, width, 1), like_embeddings(20 * BATCH, width, 2)
    raw = faiss.IndexFlatIP(width)
    raw.add(vectors)
    for shards in (1, 2):
        search_in(report, folder / str(shards), shards, vectors, queries, raw)
    ray.shutdown()


def search_in(report: Report, folder: Path, shards: int, vectors: np.ndarray, queries: np.ndarray, raw: Any) -> None:
    """The same with this many shards."""
    import ray

    from pixelis.actors.cluster import connect
    from pixelis.actors.memory import Memory as Client
    from pixelis.actors.memory import place_shards

    settings = ["cluster.cpus=4", "cluster.object_store_bytes=300000000", f"memory.shards={shards}", f"run.dir={folder}"]
    settings += [f"memory.capacity={2 * len(vectors)}", "memory.timeout_s=60", "memory.retention_days=36500"]
    config = load(None, settings)
    connect(config)
    names, actors = place_shards(config, f"bench-{shards}")
    pids = [h["pid"] for h in ray.get([a.health.remote() for a in actors])]
    client, loop = Client(names, "pixelis", config.memory), asyncio.new_event_loop()
    for start in range(0, len(vectors), 1000):
        part = [Entry(experience(start + i), v) for i, v in enumerate(vectors[start : start + 1000])]
        loop.run_until_complete(client.add(part))

    def near(start: int, count: int) -> list[list[tuple[str, float]]]:
        return loop.run_until_complete(client.nearest(queries[start : start + count], K))[0]

    def beyond_raw(start: int) -> tuple[float, float]:
        return time_call(lambda: near(start, 1)), time_call(lambda: raw.search(queries[start : start + 1], K))

    said = f"{shards} shard(s)"
    report.row(f"{said}: ids equal to brute force", recalled(near(0, BATCH), raw.search(queries[:BATCH], K)[1]), "1")
    ratio = compare(lambda: near(0, BATCH), lambda: raw.search(queries[:BATCH], K), repeats=9)
    report.row(f"{said}: {BATCH} queries / raw FAISS", ratio, "<= 1.3")
    busy = compare(lambda: near(0, BATCH), lambda: raw.search(queries[:BATCH], K), repeats=9, clock=lambda: cpu_seconds(pids))
    report.row(f"{said}: {BATCH} queries / raw FAISS, processor time", busy, "<= 1.3", "client and shards")
    pairs = [beyond_raw(i) for i in range(80)][10:]
    more = [1e3 * (a - b) for a, b in pairs]
    report.row(f"{said}: one query, ms more than raw", percentile(more, 0.5), "<= 3", f"p90 {percentile(more, 0.9):.2f}")
    report.row(f"{said}: raw one query, ms", 1e3 * percentile([b for _, b in pairs], 0.5))
    whole = [1e3 * time_call(lambda: loop.run_until_complete(client.search(queries[7], 5, track=False))) for _ in range(40)]
    report.row(f"{said}: 5 neighbours with their records, ms", percentile(whole[5:], 0.5))
    for actor in actors:
        ray.get(actor.close.remote())
        ray.kill(actor)
    loop.close()


def recall(report: Report, folder: Path, records: int, width: int) -> None:
    """HNSW with the default configuration."""
    for name, make, count in (("like embeddings", like_embeddings, records), ("noise", noise, min(records, 20_000))):
        vectors, queries = make(count, width, 1), make(500, width, 2)
        truth = faiss.IndexFlatIP(width)
        truth.add(vectors)
        exact = truth.search(queries, 10)[1]
        shard = filled(folder / name.split()[0], MemoryConfig(index="hnsw", capacity=2 * count), vectors)
        report.row(f"hnsw, {count} {name}: s to build", settled(shard))
        found = recalled(shard.search(queries, 10), exact)
        report.row(f"hnsw, {count} {name}: recall@10", found, ">= .98" if make is like_embeddings else "")
        ratio = compare(lambda: shard.search(queries[:64], 10), lambda: truth.search(queries[:64], 10))  # noqa: B023
        report.row(f"hnsw, {count} {name}: 64 queries / flat FAISS", ratio)
        gone = [f"exp_{i:016x}" for i in range(0, count, 10)]
        shard.delete(gone)
        left = np.setdiff1d(np.arange(count), np.arange(0, count, 10))
        fewer = faiss.IndexFlatIP(width)
        fewer.add(vectors[left])
        found = recalled(shard.search(queries, 10), left[fewer.search(queries, 10)[1]])
        report.row(f"hnsw, {count} {name}: recall@10 with every tenth deleted", found)
        shard.close()


def in_child(work: Callable[[], None]) -> int:
    """Fork a process that does ``work``; its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def recover(report: Report, folder: Path, records: int, width: int) -> None:
    """From opening to the first search."""
    vectors, query = like_embeddings(records, width, 1), like_embeddings(1, width, 2)
    filled(folder, MemoryConfig(capacity=2 * records), vectors).close()
    raw = faiss.IndexFlatIP(width)
    raw.add(vectors)
    faiss.write_index(raw, str(folder / "raw.faiss"))
    expected = [f"exp_{i:016x}" for i in raw.search(query, 10)[1][0]]

    def opened(config: MemoryConfig, close: bool = True) -> Shard:
        shard = Shard(folder, config)
        found = [id for id, _ in shard.search(query, 10)[0]]
        assert config.index != "flat" or found == expected
        if close:
            shard.close()
        return shard

    flat, graph = MemoryConfig(capacity=2 * records), MemoryConfig(index="hnsw", capacity=2 * records)
    ratio = compare(lambda: opened(flat), lambda: faiss.read_index(str(folder / "raw.faiss")).search(query, 10), repeats=5)
    report.row(f"flat, {records} records: open and search / FAISS reading its file", ratio)
    report.row(f"flat, {records} records: s to open and search", ratio.ours_s, "<= 10")
    report.row(f"hnsw, {records} records: s to open without a built graph", time_call(lambda: opened(graph)), "<= 10")
    shard = opened(graph, close=False)
    report.row(f"hnsw, {records} records: s to build the graph meanwhile", settled(shard))
    shard.close()

    def add_for_ever() -> None:
        shard = Shard(folder, graph)
        for number in range(10**9):
            shard.add([Entry(experience(records + 32 * number + i), vectors[(32 * number + i) % records]) for i in range(32)])

    child = in_child(add_for_ever)
    time.sleep(min(10.0, records / 10_000))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    began = time.perf_counter()
    shard = opened(graph, close=False)
    took = time.perf_counter() - began
    waiting = shard.stats()["waiting_for_index"]
    report.row(f"hnsw, {len(shard)} records: s to open after kill -9", took, "<= 10", f"{waiting} not in the graph")
    shard.close()


def add(report: Report, folder: Path, records: int, width: int) -> None:
    """Durable adds, in turns with SQLite that stores the same bytes with as many syncs."""
    vectors = like_embeddings(20_000, width, 1)
    shard = Shard(folder / "shard", MemoryConfig(capacity=10**9))
    bare = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
    bare.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE x (id TEXT UNIQUE, a TEXT, b BLOB)")
    number = [0]

    def entries(count: int) -> list[Entry]:
        number[0] += count
        return [Entry(experience(i), vectors[i % 20_000]) for i in range(number[0] - count, number[0])]

    def store(some: list[Entry]) -> None:
        bare.execute("BEGIN IMMEDIATE")
        rows = [(e.experience.id, e.experience.model_dump_json(), np.asarray(e.vector).tobytes()) for e in some]
        bare.executemany("INSERT INTO x VALUES (?, ?, ?)", rows)
        bare.execute("COMMIT")

    repeats, calls = (7, 10) if records >= 10_000 else (2, 2)
    for size in (1, 64, 1000):
        lists = iter([entries(size) for _ in range(2 * (repeats + 1) * calls)])
        ratio = compare(
            lambda: [shard.add(next(lists)) for _ in range(calls)],  # noqa: B023
            lambda: [store(next(lists)) for _ in range(calls)],  # noqa: B023
            repeats,
        )
        report.row(f"adds of {size}: shard / bare SQLite", ratio, "", f"{calls * size / ratio.ours_s:.0f} a second")
    pool = ThreadPoolExecutor(16)
    lists = iter([entries(1) for _ in range(2 * (repeats + 1) * 160)])
    before = shard.database.commits
    many = compare(
        lambda: list(pool.map(lambda _: shard.add(next(lists)), range(160))),
        lambda: [shard.add(next(lists)) for _ in range(160)],
        repeats,
    )
    commits = shard.database.commits - before
    report.row(
        "160 adds by 16 callers / one after the other", many, "< 1", f"{commits} commits of {2 * (repeats + 1) * 160} adds"
    )
    shard.close()


def kill(report: Report, folder: Path, records: int, width: int, kills: int) -> None:
    """A child adds from 8 threads until ``records`` are acknowledged, and dies ``kills`` times on the way."""
    seed = random.randrange(10**6)
    rng, told = random.Random(seed), []
    moments = sorted(rng.sample(range(100, records), kills))
    pool = like_embeddings(5000, width, 1)
    graph = MemoryConfig(index="hnsw", capacity=100 * records)
    opened: list[float] = []

    def life(number: int, out: int) -> None:
        began = time.monotonic()
        shard = Shard(folder, graph)
        os.write(out, struct.pack("<q", -1 - int(1e3 * (time.monotonic() - began))))
        ticket, lock = [number * 10**7], threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    first = ticket[0]
                    ticket[0] += 8
                some = range(first, first + 8)
                shard.add([Entry(experience(n), pool[n % 5000]) for n in some])
                os.write(out, struct.pack("<8q", *some))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        threads[0].join()

    began = time.monotonic()
    for number in range(kills + 1):
        limit = moments[number] if number < kills else records
        reading, writing = os.pipe()
        child = in_child(lambda: life(number, writing))  # noqa: B023
        os.close(writing)
        killed = False
        while content := os.read(reading, 1 << 15):
            while len(content) % 8:
                content += os.read(reading, 8 - len(content) % 8)
            numbers = struct.unpack(f"<{len(content) // 8}q", content)
            opened += [(-1 - n) / 1e3 for n in numbers if n < 0]
            told += [n for n in numbers if n >= 0]
            if len(told) >= limit and not killed:
                time.sleep(rng.random() * 0.02)
                os.kill(child, signal.SIGKILL)
                killed = True
        os.close(reading)
        os.waitpid(child, 0)
    spent = time.monotonic() - began
    shard = Shard(folder, MemoryConfig(capacity=100 * records))
    lost = sum(row is None for row in shard.rows([f"exp_{n:016x}" for n in told]))
    with shard.database.read() as db:
        stored = dict(db.execute("SELECT id, vector FROM experiences JOIN vectors USING (seq)").fetchall())
        whole = db.execute("PRAGMA integrity_check").fetchone()[0]
    wrong = sum(stored.get(f"exp_{n:016x}") != pool[n % 5000].tobytes() for n in told)
    report.row("acknowledged adds", len(told), f">= {records}", f"{kills} kills and one at the end, {spent:.0f} s, seed {seed}")
    report.row("acknowledged and lost", lost, "0")
    report.row("vectors not as acknowledged", wrong, "0")
    report.row("vectors in the index but not in the database, or the reverse", abs(shard.stats()["vectors"] - len(stored)), "0")
    report.row("SQLite's integrity check", whole, "ok")
    report.row("s to open after a kill, worst", max(opened), "<= 10", f"of {len(opened)}")
    shard.close()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dir", help="folder to work in; it is emptied afterwards (default: a temporary one)")
    args = parse_args(parser, records=1500, width=32, kills=2)
    faiss.omp_set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    report = Report("memory")
    root = Path(tempfile.mkdtemp(prefix="pixelis-memory-", dir=args.dir))
    try:
        # A fork has to come before Ray and its threads.
        for part in sorted(args.part, key=["kill", "recover", "recall", "add", "search"].index):
            more = (args.kills,) if part == "kill" else ()
            globals()[part](report, root / part, args.records, args.width, *more)
            shutil.rmtree(root / part, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.close()


if __name__ == "__main__":
    main()
