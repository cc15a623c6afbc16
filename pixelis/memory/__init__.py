"""The experience memory: one shard, pure: SQLite is the record of truth, FAISS is derived from it. No Ray."""

from pixelis.memory.shard import Entry, Shard
from pixelis.memory.vectors import combine

__all__ = ["Entry", "Shard", "combine"]
