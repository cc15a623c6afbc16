"""The `pixelis` command: ``pixelis JOB ...`` runs a job like ``python -m pixelis.jobs.JOB ...``."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path

from pixelis import __version__

JOBS = (
    "quickstart",
    "synthesize",
    "refine",
    "distill",
    "sft",
    "rft",
    "ttrl",
    "ranks",
    "evaluate",
    "reproduce",
    "ablate",
    "rate",
    "answer",
    "serve",
    "export",
    "operate",
    "mcp",
    "audit",
    "keys",
    "top",
    "trace",
    "lineage",
    "doctor",
    "recipes",
    "adopt",
    "tiny-model",
    "completion",
)


def described(job: str) -> str:
    """The first line of a job's help, read without importing the job."""
    source = Path(__file__).with_name(f"{job.replace('-', '_')}.py").read_text(encoding="utf-8")
    return source.removeprefix('"""').partition("\n")[0]


def overview() -> str:
    jobs = "\n".join(f"  {job:<12} {described(job)}" for job in JOBS)
    return (
        f"Pixelis {__version__}: train, serve and evolve vision-language models that reason with pixel "
        "operations.\n\n"
        f"usage: pixelis JOB [CONFIG.yaml] [key=value ...] [--dry-run] [--help]\n\n{jobs}\n\n"
        "`pixelis JOB --help` explains a job; every job also runs as `python -m pixelis.jobs.JOB` and "
        "under `ray job submit`.\n"
        'Completion: eval "$(pixelis completion bash)"'
    )


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help", "help"):
        print(overview())
        return
    if sys.argv[1] in ("-V", "--version"):
        print(__version__)
        return
    name = sys.argv[1].replace("_", "-")
    if name not in JOBS:
        near = difflib.get_close_matches(name, JOBS, n=1)
        hint = f"did you mean `pixelis {near[0]}`?" if near else "`pixelis --help` lists the jobs"
        print(f"pixelis: no job `{sys.argv[1]}`\n  fix: {hint}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [f"pixelis {name}", *sys.argv[2:]]
    # Like `python -m`: user-defined rewards and algorithms may be in the current folder
    if "" not in sys.path:
        sys.path.insert(0, "")
    raise SystemExit(importlib.import_module(f"pixelis.jobs.{name.replace('-', '_')}").main())


if __name__ == "__main__":
    main()
