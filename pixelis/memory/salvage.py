"""Finds damage in the file of a shard, and copies every intact record to a new file.

Each row has a checksum, because SQLite notices damage to its own structures only. ``damaged`` reads the whole file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelis.memory.schema import CHECKED, intact, placeholders


def damaged(db: sqlite3.Connection) -> str:
    """What is wrong with the file, in a line; empty if nothing is. Reads everything."""
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
    """What ``salvage`` could not copy: ids of experiences (unreadable ones have none), and of those copied without a part."""

    experiences: int = 0
    lost: int = 0
    lost_ids: list[str] = field(default_factory=list)
    without_vector: list[str] = field(default_factory=list)
    without_pictures: list[str] = field(default_factory=list)


def salvage(source: sqlite3.Connection, target: sqlite3.Connection) -> Salvage:
    """Copy every intact row of ``source`` to ``target``, which has the tables and is empty."""
    result, seqs = Salvage(), sorted(_seqs(source))
    for name, value in _rows(source, "facts", "name != 'name'"):
        target.execute(f"INSERT INTO facts VALUES (?, ?, {placeholders(CHECKED['facts'])})", (name, value) * 2)
    names: dict[int, set[str]] = {}
    _copy_pictures(source, target)
    for seq, name in _read(source, "SELECT seq, name FROM experience_pictures INDEXED BY by_picture"):
        names.setdefault(seq, set()).add(name)
    for seq in seqs:
        (row,) = list(_rows(source, "experiences", "seq = ?", seq)) or (None,)
        if row is None:
            result.lost += 1
            result.lost_ids += [id for (id,) in _read(source, "SELECT id FROM experiences WHERE seq = ?", seq)]
            continue
        columns, marks = ", ".join(CHECKED["experiences"]), ", ".join("?" * len(row))
        insert = f"INSERT INTO experiences (seq, {columns}, checksum) VALUES (?, {marks}, {placeholders(CHECKED['experiences'])})"
        target.execute(insert, (seq, *row, *row))
        result.experiences += 1
        stored = len(list(_read(source, "SELECT seq FROM vectors WHERE seq = ?", seq)))
        vectors = list(_rows(source, "vectors", "seq = ?", seq))
        for vector in vectors:
            target.execute(f"INSERT INTO vectors VALUES (?, ?, {placeholders(CHECKED['vectors'])})", (*vector, *vector))
        if stored != len(vectors):
            result.without_vector.append(row[0])
        stored_names = {name for (name,) in _read(source, "SELECT name FROM experience_pictures WHERE seq = ?", seq)}
        if not _link_pictures(source, target, seq) >= stored_names | names.get(seq, set()):
            result.without_pictures.append(row[0])
    target.execute("DELETE FROM pictures WHERE hash NOT IN (SELECT hash FROM experience_pictures)")
    for row in _read(source, "SELECT seq, retrieval, succeeded, told_at FROM retrievals"):
        target.execute(
            "INSERT OR IGNORE INTO retrievals SELECT ?, ?, ?, ? WHERE ? IN (SELECT seq FROM experiences)", (*row, row[0])
        )
    for (last,) in _read(source, "SELECT seq FROM sqlite_sequence WHERE name = 'experiences'"):
        target.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'experiences'", (last,))
    return result


def _copy_pictures(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy all intact pictures, also those that only the index or one end of the table still names."""
    ways = ["NOT INDEXED ORDER BY rowid", "NOT INDEXED ORDER BY rowid DESC", "INDEXED BY by_hash"]
    for rowid in {rowid for way in ways for (rowid,) in _read(source, f"SELECT rowid FROM pictures {way}")}:
        for row in _read(source, f"SELECT hash, png FROM pictures WHERE rowid = ? AND {intact('pictures')}", rowid):
            target.execute("INSERT OR IGNORE INTO pictures VALUES (?, ?)", row)


def _link_pictures(source: sqlite3.Connection, target: sqlite3.Connection, seq: int) -> set[str]:
    """Copy the names of an experience's pictures whose content is copied; returns them."""
    insert = f"INSERT INTO experience_pictures SELECT ?, ?, ?, {placeholders(CHECKED['experience_pictures'])}"
    return {
        row[1]
        for row in _rows(source, "experience_pictures", "seq = ?", seq)
        if target.execute(f"{insert} WHERE ? IN (SELECT hash FROM pictures)", (*row, *row, row[2])).rowcount
    }


def _rows(db: sqlite3.Connection, table: str, condition: str, *values: Any) -> Iterator[Sequence[Any]]:
    """The checked columns of the intact rows that meet a condition, as far as they can be read."""
    return _read(db, f"SELECT {', '.join(CHECKED[table])} FROM {table} WHERE {condition} AND {intact(table)}", *values)


def _read(db: sqlite3.Connection, query: str, *values: Any) -> Iterator[Sequence[Any]]:
    """The rows of a query until one cannot be read."""
    try:
        yield from db.execute(query, values)
    except sqlite3.DatabaseError:
        return


def _seqs(db: sqlite3.Connection) -> set[int]:
    """Numbers of all experiences that the table, from both ends, or any of its indexes still names."""
    ways = [f"{place} ORDER BY {order}" for place in ("experiences NOT INDEXED",) for order in ("seq", "seq DESC")]
    ways += [f"experiences INDEXED BY {index}" for index in ("by_time", "by_user", "by_priority")]
    ways += ["vectors", "experience_pictures"]
    return {seq for way in ways for (seq,) in _read(db, f"SELECT seq FROM {way}") if isinstance(seq, int)}
