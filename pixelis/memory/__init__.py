"""The experience memory: one shard, pure: SQLite is the record of truth, FAISS is derived from it. No Ray."""
