"""Finds damage in the file of a shard, and copies every intact record to a new file.

Each row has a checksum, because SQLite notices damage to its own structures only. ``check`` reads the whole file.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

CHECKED = {
    "experiences": ("id", "created_at", "user", "status", "priority", "retrievals", "successes", "feedback", "record"),
    "vectors": ("seq", "vector"),
    "pictures": ("seq", "name", "png"),
    "facts": ("name", "value"),
}
"""Tables whose rows have a ``checksum``, and the columns that it covers."""


def digest(*values: Any) -> bytes:
    """Checksum of the values of a row; text is passed as bytes, because damaged text may not be UTF-8."""
    result = hashlib.blake2b(digest_size=8)
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        result.update(b"%d:" % len(data))
        result.update(data)
    return result.digest()


def checksum(table: str, row: str = "") -> str:
    """The SQL expression of the checksum of a row of ``table``; ``row`` is ``new`` in a trigger."""
    numbers = {"seq", "created_at", "priority", "retrievals", "successes"}
    names = [(name, f"{row}.{name}" if row else name) for name in CHECKED[table]]
    return f"digest({', '.join(name if column in numbers else f'CAST({name} AS BLOB)' for column, name in names)})"


def prepare(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Give a connection the function ``digest``; damaged text is returned with replacement characters instead of raising."""
    connection.create_function("digest", -1, digest, deterministic=True)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


def damaged(db: sqlite3.Connection) -> str:
    """What is wrong with the file, in a line; empty if nothing is. Reads everything."""
    try:
        problems = [line for (line,) in db.execute("PRAGMA integrity_check(3)") if line != "ok"]
        if problems:
            return "; ".join(problem.replace("\n", " ") for problem in problems)
        for table in CHECKED:
            (count,) = db.execute(f"SELECT count(*) FROM {table} WHERE checksum IS NOT {checksum(table)}").fetchone()
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
    """Copy every intact row of a damaged ``source`` to ``target``, which has the tables and is empty."""
    result, seqs = Salvage(), sorted(_seqs(source))
    for name, value in _rows(source, "facts", "name != 'name'"):
        target.execute(f"INSERT INTO facts VALUES (?, ?, {_placeholders('facts')})", (name, value) * 2)
    for seq in seqs:
        (row,) = list(_rows(source, "experiences", "seq = ?", seq)) or (None,)
        if row is None:
            result.lost += 1
            result.lost_ids += [id for (id,) in _read(source, "SELECT id FROM experiences WHERE seq = ?", seq)]
            continue
        names = ", ".join(CHECKED["experiences"])
        marks = ", ".join("?" * len(row))
        insert = f"INSERT INTO experiences (seq, {names}, checksum) VALUES (?, {marks}, {_placeholders('experiences')})"
        target.execute(insert, (seq, *row, *row))
        result.experiences += 1
        for table, incomplete in (("vectors", result.without_vector), ("pictures", result.without_pictures)):
            stored = len(list(_read(source, f"SELECT seq FROM {table} WHERE seq = ?", seq)))
            parts = list(_rows(source, table, "seq = ?", seq))
            for part in parts:
                columns = ", ".join("?" * len(part))
                target.execute(f"INSERT INTO {table} VALUES ({columns}, {_placeholders(table)})", (*part, *part))
            if stored != len(parts):
                incomplete.append(row[0])
    for row in _read(source, "SELECT seq, retrieval, succeeded, told_at FROM retrievals"):
        if row[0] in seqs:
            target.execute(
                "INSERT OR IGNORE INTO retrievals SELECT ?, ?, ?, ? WHERE ? IN (SELECT seq FROM experiences)", (*row, row[0])
            )
    for (last,) in _read(source, "SELECT seq FROM sqlite_sequence WHERE name = 'experiences'"):
        target.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'experiences'", (last,))
    return result


def _placeholders(table: str) -> str:
    """``digest`` of as many parameters as the table has checked columns."""
    numbers = {"seq", "created_at", "priority", "retrievals", "successes"}
    return f"digest({', '.join('?' if c in numbers else 'CAST(? AS BLOB)' for c in CHECKED[table])})"


def _rows(db: sqlite3.Connection, table: str, condition: str, *values: Any) -> Iterator[Sequence[Any]]:
    """The checked columns of the intact rows that meet a condition, as far as they can be read."""
    return _read(
        db, f"SELECT {', '.join(CHECKED[table])} FROM {table} WHERE {condition} AND checksum IS {checksum(table)}", *values
    )


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
    ways += ["vectors", "pictures"]
    return {seq for way in ways for (seq,) in _read(db, f"SELECT seq FROM {way}") if isinstance(seq, int)}
