"""The `pixelis` command: ``pixelis JOB [CONFIG.yaml] [key=value ...]`` runs a job, as ``python -m pixelis.jobs.JOB`` does."""

from __future__ import annotations

import difflib
import importlib
import sys

from pixelis import __version__

JOBS = {
    "quickstart": "train, evaluate, serve and evolve the embedded model in about ten minutes",
    "synthesize": "make demonstrations from annotated pictures and clips",
    "refine": "filter demonstrations: quality, duplicates, gates, recipes",
    "sft": "fine-tune on demonstrations",
    "rft": "train by reinforcement, with pixel operations in the rollouts",
    "ttrl": "adapt to questions without answers by majority votes",
    "ranks": "find a LoRA rank for each layer from a full fine-tune",
    "evaluate": "measure a policy on held-out questions",
    "serve": "serve the agent over HTTP and let it learn from its traffic",
    "operate": "run one pixel operation on a picture or clip",
    "audit": "verify and search the audit log of a service",
    "lineage": "print what a checkpoint, a data set or a result was made from",
    "doctor": "check what this machine can do and how to get what is missing",
    "recipes": "list the recipes, or copy them to a folder",
    "tiny-model": "make a small random Qwen2.5-VL or Qwen3-VL folder, offline",
    "completion": "print the shell completion for bash or zsh",
}
"""Every job with the line that `pixelis --help` shows."""


def overview() -> str:
    """The text of `pixelis --help`."""
    jobs = "\n".join(f"  {name:<12} {line}" for name, line in JOBS.items())
    return (
        f"Pixelis {__version__}: train, serve and evolve vision-language models that reason with pixel operations.\n\n"
        f"usage: pixelis JOB [CONFIG.yaml] [key=value ...] [--dry-run] [--help]\n\n{jobs}\n\n"
        "`pixelis JOB --help` explains a job; every job also runs as `python -m pixelis.jobs.JOB` and under `ray job submit`.\n"
        'Completion: eval "$(pixelis completion bash)"'
    )


def main() -> None:
    """Entry point of the `pixelis` command."""
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
    if "" not in sys.path:  # own rewards and algorithms are found in this folder, as with `python -m`
        sys.path.insert(0, "")
    raise SystemExit(importlib.import_module(f"pixelis.jobs.{name.replace('-', '_')}").main())


if __name__ == "__main__":
    main()
