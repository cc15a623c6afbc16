"""The tables of a shard's file, and the checksums of their rows.

A picture is stored once, under the hash of its bytes, however many experiences show it. It is deleted with
the last of them.
"""

from __future__ import annotations

import hashlib
import sqlite3
import uuid
from typing import Any

SCHEMA = 3
CHECKED = {
    "experiences": (
        *("id", "created_at", "user", "status", "priority"),
        *("retrievals", "successes", "feedback", "record"),
    ),
    "vectors": ("seq", "vector"),
    "experience_pictures": ("seq", "name", "hash"),
    "facts": ("name", "value"),
}
"""Tables whose rows have a ``checksum``, and the columns that it covers. In ``pictures`` it is the hash."""
NUMBERS = {"seq", "created_at", "priority", "retrievals", "successes"}


def digest(*values: Any) -> bytes:
    """Checksum of the values of a row; text is passed as bytes, because damaged text may not be UTF-8."""
    result = hashlib.blake2b(digest_size=8)
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        result.update(b"%d:" % len(data))
        result.update(data)
    return result.digest()


def content_hash(picture: bytes) -> bytes:
    """The key of a picture. Long enough that nobody can make another picture with the same one."""
    return hashlib.blake2b(picture, digest_size=32).digest()


def checksum(columns: tuple[str, ...], row: str = "") -> str:
    """The SQL expression of the checksum of these columns; ``row`` is ``new`` in a trigger."""
    names = [(name, f"{row}.{name}" if row else name) for name in columns]
    return f"digest({', '.join(name if column in NUMBERS else f'CAST({name} AS BLOB)' for column, name in names)})"


def intact(table: str) -> str:
    """The SQL condition that a row of ``pictures`` or a ``CHECKED`` table is as it was written."""
    return (
        "hash IS content_hash(CAST(png AS BLOB))"
        if table == "pictures"
        else f"checksum IS {checksum(CHECKED[table])}"
    )


TABLES = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE experiences (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, created_at REAL NOT NULL, user TEXT, status TEXT NOT NULL,
  priority REAL NOT NULL, retrievals INTEGER NOT NULL, successes INTEGER NOT NULL, feedback TEXT NOT NULL, record TEXT NOT NULL,
  checksum BLOB);
CREATE INDEX by_time ON experiences (created_at);
CREATE INDEX by_user ON experiences (user, created_at);
CREATE INDEX by_priority ON experiences (priority, seq);
CREATE TABLE vectors (seq INTEGER PRIMARY KEY REFERENCES experiences ON DELETE CASCADE, vector BLOB NOT NULL, checksum BLOB);
CREATE TABLE pictures (hash BLOB NOT NULL, png BLOB NOT NULL);
CREATE UNIQUE INDEX by_hash ON pictures (hash);
CREATE TABLE experience_pictures (
  seq INTEGER NOT NULL REFERENCES experiences ON DELETE CASCADE, name TEXT NOT NULL,
  hash BLOB NOT NULL REFERENCES pictures (hash), checksum BLOB, PRIMARY KEY (seq, name)) WITHOUT ROWID;
CREATE INDEX by_picture ON experience_pictures (hash);
CREATE TABLE retrievals (
  seq INTEGER NOT NULL REFERENCES experiences ON DELETE CASCADE, retrieval TEXT NOT NULL, succeeded INTEGER NOT NULL,
  told_at REAL NOT NULL, PRIMARY KEY (seq, retrieval)) WITHOUT ROWID;
CREATE INDEX retrievals_by_time ON retrievals (told_at);
CREATE TRIGGER experience_updated AFTER UPDATE OF status, priority, retrievals, successes, feedback ON experiences BEGIN
  UPDATE experiences SET checksum = {checksum(CHECKED["experiences"], "new")} WHERE seq = new.seq; END;
CREATE TRIGGER experience_picture_deleted AFTER DELETE ON experience_pictures
  WHEN NOT EXISTS (SELECT 1 FROM experience_pictures WHERE hash = old.hash) BEGIN
  DELETE FROM pictures WHERE hash = old.hash; END;
"""
"""``seq`` is never reused (AUTOINCREMENT), so that an index may refer to it across deletions and restarts."""


def prepare(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Give a connection the hash functions; damaged text is read with replacement characters."""
    connection.create_function("digest", -1, digest, deterministic=True)
    connection.create_function("content_hash", 1, content_hash, deterministic=True)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


def create(db: sqlite3.Connection) -> None:
    db.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version={SCHEMA}; COMMIT;")
    set_fact(db, "name", uuid.uuid4().hex)


def set_fact(db: sqlite3.Connection, name: str, value: str) -> None:
    db.execute(
        "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (name, value, digest(name.encode(), value.encode()))
    )


def add_picture(db: sqlite3.Connection, seq: int, name: str, hash: bytes, png: bytes) -> None:
    """Store a picture of an experience, unless it is stored; a damaged copy of it is replaced."""
    known = "ON CONFLICT (hash) DO UPDATE SET png = excluded.png WHERE png IS NOT excluded.png"
    db.execute(f"INSERT INTO pictures VALUES (?, ?) {known}", (hash, png))
    db.execute(
        "INSERT INTO experience_pictures VALUES (?, ?, ?, ?)",
        (seq, name, hash, digest(seq, name.encode(), hash)),
    )
