"""pixelis-nano: a vision-language model with a production architecture that trains on two CPU cores in
minutes.
"""

from pathlib import Path

BASE = Path(__file__).parent / "base"
"""Folder of the packaged base checkpoint, for `from_pretrained`."""
