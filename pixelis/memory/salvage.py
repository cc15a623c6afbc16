"""Finds damage in the file of a shard, and copies every intact record to a new file.

Each row has a checksum, because SQLite notices damage to its own structures only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelis.memory.schema import CHECKED, intact


def damaged(db: sqlite3.Connection) -> str:
    """The first problem of the file in one line; empty if there is none. Reads everything."""
    try:
        problems = [line for (line,) in db.execute("PRAGMA integrity_check(3)") if line != "ok"]
        if problems:
            return "; ".join(problem.replace("\n", " ") for problem in problems)
        for table in (*CHECKED, "pictures"):
            (count,) = db.execute(f"SELECT count(*) FROM {table} WHERE NOT ({intact(table)})").fetchone()
            if count:
                return f"{count} rows of {table} differ from their checksums"
    except sqlite3.DatabaseError as error:
        return str(error)
    return ""


@dataclass(slots=True)
class Salvage:
    """Numbers of experiences copied and lost, and the ids of those lost or copied without a part.

    ``changes``: number of acknowledged changes, such as feedback, that are lost, also of these experiences.
    """

    experiences: int = 0
    lost: int = 0
    changes: int = 0
    lost_ids: list[str] = field(default_factory=list)
    without_vector: list[str] = field(default_factory=list)
    without_pictures: list[str] = field(default_factory=list)


def salvage(source: sqlite3.Connection, target: sqlite3.Connection) -> Salvage:
    """Copy every intact row of ``source`` to ``target``, which has the tables and is empty."""
    result = Salvage()
    for row in _intact(source, "facts", "name != 'name'"):
        _insert(target, "facts", row)
    # A damaged page hides rows from one way of reading a table and not from another: try all ways.
    for way in ("NOT INDEXED ORDER BY rowid", "NOT INDEXED ORDER BY rowid DESC", "INDEXED BY by_hash"):
        for (rowid,) in list(_read(source, f"SELECT rowid FROM pictures {way}")):
            for row in _intact(source, "pictures", "rowid = ?", rowid):
                _insert(target, "pictures", row)
    ways = [
        "vectors",
        "experience_pictures",
        "experiences NOT INDEXED",
        "experiences NOT INDEXED ORDER BY seq DESC",
    ]
    ways += [f"experiences INDEXED BY {index}" for index in ("by_time", "by_user", "by_priority")]
    seqs = {seq for way in ways for (seq,) in _read(source, f"SELECT seq FROM {way}") if isinstance(seq, int)}
    named: dict[int, set[str]] = {}
    for seq, name in _read(source, "SELECT seq, name FROM experience_pictures INDEXED BY by_picture"):
        named.setdefault(seq, set()).add(name)
    for seq in sorted(seqs):
        experience = next(_intact(source, "experiences", "seq = ?", seq), None)
        if experience is None:
            result.lost += 1
            result.lost_ids += [
                id for (id,) in _read(source, "SELECT id FROM experiences WHERE seq = ?", seq)
            ]
            continue
        id = experience[1]
        _insert(target, "experiences", experience)
        result.experiences += 1
        stored, vectors = (list(read(source, "vectors", "seq = ?", seq)) for read in (_all, _intact))
        for row in vectors:
            _insert(target, "vectors", row)
        if len(vectors) != len(stored):
            result.without_vector.append(id)
        names = {name for _, name, *_ in _all(source, "experience_pictures", "seq = ?", seq)} | named.get(
            seq, set()
        )
        for row in _intact(source, "experience_pictures", "seq = ?", seq):
            if target.execute("SELECT 1 FROM pictures WHERE hash = ?", (row[2],)).fetchone():
                _insert(target, "experience_pictures", row)
                names.discard(row[1])
        if names:
            result.without_pictures.append(id)
    target.execute("DELETE FROM pictures WHERE hash NOT IN (SELECT hash FROM experience_pictures)")
    for row in _read(source, "SELECT * FROM retrievals"):
        if target.execute("SELECT 1 FROM experiences WHERE seq = ?", (row[0],)).fetchone():
            _insert(target, "retrievals", row)
    for (last,) in _read(source, "SELECT seq FROM sqlite_sequence WHERE name = 'experiences'"):
        target.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'experiences'", (last,))
    return result


def _insert(db: sqlite3.Connection, table: str, row: Sequence[Any]) -> None:
    db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def _intact(db: sqlite3.Connection, table: str, condition: str, *values: Any) -> Iterator[Sequence[Any]]:
    return _all(db, table, f"{condition} AND {intact(table)}", *values)


def _all(db: sqlite3.Connection, table: str, condition: str, *values: Any) -> Iterator[Sequence[Any]]:
    return _read(db, f"SELECT * FROM {table} WHERE {condition}", *values)


def _read(db: sqlite3.Connection, query: str, *values: Any) -> Iterator[Sequence[Any]]:
    """The rows of a query until one cannot be read."""
    try:
        yield from db.execute(query, values)
    except sqlite3.DatabaseError:
        return
