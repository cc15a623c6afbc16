"""Commands with options of their own: help is the module's text, errors name a fix, exit codes agree."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from pixelis.errors import BadConfig, PixelisError


class CommandParser(argparse.ArgumentParser):
    """Parses the words of ``pixelis COMMAND``; BadConfig for invalid ones."""

    def __init__(self, command: str = "", **options: Any):
        super().__init__(
            **{"prog": f"pixelis {command}", "add_help": False, "allow_abbrev": False, **options}
        )

    def error(self, message: str) -> NoReturn:
        raise BadConfig(message, fix=f"{self.prog} --help")


def asks_for_help(words: Sequence[str]) -> bool:
    return "--help" in words or "-h" in words


def file_and_overrides(command: str, fix: str) -> tuple[str, list[str], bool]:
    """The file, its ``key=value`` and whether to run dry, of ``pixelis COMMAND FILE ...``; BadConfig ends with ``fix``."""
    parser = CommandParser(command)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_intermixed_args(sys.argv[1:])
    files = [word for word in options.words if "=" not in word]
    if len(files) != 1:
        raise BadConfig(f"{len(files)} files", fix=fix)
    return files[0], [word for word in options.words if "=" in word], options.dry_run


@contextmanager
def command(name: str, text: str | None) -> Iterator[CommandParser]:
    """Context of a command's main, with its parser: prints ``text`` if the words ask for help.

    An error ends the process: with 2 for a BadConfig, with 1 for other errors of Pixelis and of files.
    """
    if asks_for_help(sys.argv[1:]):
        print((text or "").strip())
        raise SystemExit(0)
    try:
        yield CommandParser(name)
    except PixelisError as error:
        print(f"pixelis {name}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, BadConfig) else 1) from None
    except OSError as error:
        # transformers raises some without a number or a file
        text = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
        print(f"pixelis {name}: {text}", file=sys.stderr)
        raise SystemExit(1) from None
