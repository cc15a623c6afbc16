"""The command line of the jobs: ``[CONFIG.yaml] [key=value ...] [--dry-run] [--help [SECTION | --all]]``."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

import yaml

from pixelis.config.base import SYNONYMS, leaf_keys
from pixelis.config.load import load_with_origins
from pixelis.config.root import Config, absolute
from pixelis.errors import BadConfig, MissingFile, PixelisError

SECTIONS = {
    "quickstart": ("quickstart", "run"),
    "synthesize": ("synthesis", "run"),
    "refine": ("refinement", "data"),
    "distill": ("distill", "data"),
    "sft": ("sft", "data"),
    "ranks": ("ranks",),
    "rft": ("rft", "rewards"),
    "ttrl": ("ttrl", "rft"),
    "evaluate": ("evaluate", "data"),
    "answer": ("data",),
    "serve": ("serve", "evolution", "memory"),
}
"""Job -> the sections that its `--help` shows in full; the others take one line each."""


def from_command_line(
    doc: str,
    job: str,
    argv: Sequence[str] | None = None,
    default: str | None = None,
    check: Callable[[Config], None] | None = None,
) -> Config:
    """Parse the command line of a job; exits for ``--help``, ``--dry-run`` and, with code 2, an invalid
    configuration.

    ``default``: the file to use when none is named. ``check``: called by a dry run; an error of it exits with
    code 2 for BadConfig and 1 for others.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--help" in args or "-h" in args:
            _print_help(doc, job, args, default)
            raise SystemExit(0)
        flags = [a for a in args if a.startswith("-") and a != "--dry-run"]
        if flags:
            raise BadConfig(f"unknown option {flags[0]}", fix=_suggestion(flags[0], args))
        # Folders are also named after settings: runs/lr=0.1/config.yaml.
        files = [a for a in args if not a.startswith("-") and ("=" not in a or os.path.isfile(a))]
        if len(files) > 1:
            raise BadConfig(
                f"{len(files)} configuration files: {' '.join(files)}",
                fix="give one file that extends the other with `extends:`",
            )
        overrides = [a for a in args if a not in files and not a.startswith("-") and a != "--dry-run"]
        config, origins = load_with_origins(files[0] if files else default, overrides)
        config = absolute(config)
    except (BadConfig, MissingFile) as error:
        _fail(job, error, 2)
    if "--dry-run" in args:
        print(with_origins(config.to_yaml(), origins), end="", flush=True)
        try:
            if check is not None:
                check(config)
        except PixelisError as error:
            _fail(job, error, 2 if isinstance(error, BadConfig) else 1)
        raise SystemExit(0)
    return config


def with_origins(text: str, origins: Mapping[str, str]) -> str:
    """YAML with the origin of each key as a comment; loads to the same values."""
    lines = text.splitlines()
    for path, line in _ends(yaml.compose(text, yaml.SafeLoader)):
        lines[line] = f"{lines[line]:<40}  # {origins.get(path, 'default')}"
    return "\n".join(lines) + "\n"


def _ends(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each key and the line on which its scalar value ends, or its list or mapping begins."""
    keys = {path for path, *_ in leaf_keys(Config)}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path = prefix + key.value
        if path in keys:
            yield path, value.end_mark.line if isinstance(value, yaml.ScalarNode) else key.end_mark.line
        else:
            yield from _ends(value, f"{path}.")


def _fail(job: str, error: PixelisError, code: int) -> None:
    print(f"pixelis {job}: {error}", file=sys.stderr)
    raise SystemExit(code) from None


def _suggestion(flag: str, args: Sequence[str]) -> str:
    """The override for an unknown flag: ``--lr 3`` -> ``learner.lr=3``."""
    name, _, value = flag.lstrip("-").replace("-", "_").partition("=")
    paths = [path for path, *_ in leaf_keys(Config)]
    near = [SYNONYMS[name]] if name in SYNONYMS else [p for p in paths if f".{p}".endswith(f".{name}")]
    near = near or difflib.get_close_matches(name, paths, 1)
    if not near:
        return "options are key=value, --dry-run and --help"
    rest = list(args)[list(args).index(flag) + 1 :]
    value = value or next((a for a in rest[:1] if not a.startswith("-")), "VALUE")
    return f"did you mean {near[0]}={value}? Options are key=value, --dry-run and --help"


def _print_help(doc: str, job: str, args: Sequence[str], default: str | None) -> None:
    topics = [a for a in args if not a.startswith("-") and "=" not in a and not a.endswith(".yaml")]
    if "--all" in args:
        text = "\n".join(_entry(*row) for row in leaf_keys(Config))
    elif topics:
        text = section_help(topics[0])
    else:
        usage = f"usage: pixelis {job} [CONFIG.yaml] [key=value ...] [--dry-run] [--help [SECTION | --all]]"
        usage += (
            "\nA text is taken as it is; lists and maps are YAML: '[a, b]', '{a: 1}'; null restores "
            "the default."
        )
        start = (
            f"Without CONFIG.yaml it runs {default}; `pixelis recipes` lists the recipes." if default else ""
        )
        text = "\n\n".join(part for part in (doc.strip(), usage, start, _overview(job)) if part)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def section_help(section: str) -> str:
    """The keys of a section such as ``rft.advantage``, or one key, with type, default and description."""
    rows = [row for row in leaf_keys(Config) if row[0] == section or row[0].startswith(section + ".")]
    if not rows:
        names = sorted({path.rsplit(".", n)[0] for path, *_ in leaf_keys(Config) for n in range(3)})
        near = difflib.get_close_matches(section, names, n=1)
        raise BadConfig(
            f"no section or key `{section}`",
            fix=f"did you mean `{near[0]}`?" if near else "--help lists the sections",
        )
    return "\n".join(_entry(*row) for row in rows)


def _entry(path: str, kind: str, default: object, description: str) -> str:
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    body = textwrap.fill(description, width, initial_indent="    ", subsequent_indent="    ")
    return f"{path}={json.dumps(default, default=str)}  ({kind})\n{body}"


def _overview(job: str) -> str:
    """One line for each key of the job's sections, and for each other section."""
    width = max(80, min(140, shutil.get_terminal_size((120, 24)).columns))
    own, rows, lines = SECTIONS.get(job, ()), leaf_keys(Config), []
    for section in own:
        lines.append(f"{section}: {Config.model_fields[section].description}")
        nested: dict[str, int] = {}
        for path, _, default, description in rows:
            head, *tail = path.split(".")
            if head == section and len(tail) == 1:
                text = f"  {path}={json.dumps(default, default=str)}"
                lines.append(_cut(text, description, width))
            elif head == section:
                nested[f"{head}.{tail[0]}"] = nested.get(f"{head}.{tail[0]}", 0) + 1
        lines += [
            _cut(f"  {name}.*", f"{count} keys: --help {name}", width) for name, count in nested.items()
        ] + [""]
    lines.append("Other sections, each explained by --help SECTION:")
    for name, field in Config.model_fields.items():
        if name not in own:
            lines.append(_cut(f"  {name}", field.description or "", width))
    return "\n".join(lines)


def _cut(left: str, right: str, width: int) -> str:
    line = f"{left:<44} {right}"
    return line if len(line) <= width else line[: width - 4].rstrip() + " ..."
