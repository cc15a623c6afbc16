"""Measurements: every figure the project states comes from a command here. `python -m benchmarks.NAME --help`."""
