"""The experience memory: a shard with SQLite as the record of truth and a FAISS index derived from it. No Ray."""

from pixelis.memory.portable import Entry
from pixelis.memory.shard import Shard
from pixelis.memory.vectors import combine

__all__ = ["Entry", "Shard", "combine"]
