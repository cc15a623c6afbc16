"""The experience memory: a shard with SQLite as the record of truth and a FAISS index derived from it.

No Ray.
"""

from pixelis.memory.portable import Entry
from pixelis.memory.shard import Shard

__all__ = ["Entry", "Shard"]
