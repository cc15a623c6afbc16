"""Demonstrations in a file, in any order and selection, of which a process holds only some bytes per row."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np

from pixelis.records import Demonstration


class Spool(Sequence[Demonstration]):
    """The rows of a file of JSON lines, as a sequence. Selections share the file; `rewrite` ends them."""

    def __init__(self, file: BinaryIO, starts: np.ndarray, sizes: np.ndarray):
        self.file, self.starts, self.sizes = file, starts, sizes

    @classmethod
    def write(cls, path: Path, rows: Iterable[Demonstration]) -> Spool:
        """Write the rows to a new file; close it with `close`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = array("q")
        with path.open("wb") as out:
            for row in rows:
                written.append(out.write(row.model_dump_json().encode() + b"\n"))
        sizes = np.array(written, np.int64)
        return cls(path.open("rb"), np.cumsum(sizes) - sizes, sizes)

    def select(self, indices: Sequence[int] | np.ndarray) -> Spool:
        chosen = np.asarray(indices, np.int64)
        return Spool(self.file, self.starts[chosen], self.sizes[chosen])

    def where(self, condition: Callable[[Demonstration], bool]) -> Spool:
        return self.select([i for i, row in enumerate(self) if condition(row)])

    def rewrite(self, change: Callable[[Demonstration], Demonstration]) -> Spool:
        """The changed rows, in a new file in place of this one."""
        path = Path(self.file.name)
        changed = Spool.write(path.with_suffix(".aside"), map(change, self))
        path.with_suffix(".aside").replace(path)
        changed.close()
        self.close()
        return Spool(path.open("rb"), changed.starts, changed.sizes)

    def close(self) -> None:
        self.file.close()

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Demonstration]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Demonstration: ...

    @overload
    def __getitem__(self, index: slice) -> Spool: ...

    def __getitem__(self, index: int | slice) -> Demonstration | Spool:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        self.file.seek(self.starts[index])
        return Demonstration.model_validate_json(self.file.read(self.sizes[index]))
