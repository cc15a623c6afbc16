"""pixelis-nano: a vision-language model of a production architecture, small enough to train on two CPU cores in minutes."""

from pathlib import Path

BASE = Path(__file__).parent / "base"
"""Folder of the committed base checkpoint (loads with `from_pretrained`)."""
