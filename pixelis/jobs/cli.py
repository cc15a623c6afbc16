"""The `pixelis` command: ``pixelis JOB ...`` runs a job like ``python -m pixelis.jobs.JOB ...``."""

from __future__ import annotations

import difflib
import importlib
import sys

from pixelis import __version__

JOBS = {
    "quickstart": "train, evaluate, serve and evolve the embedded model in about ten minutes",
    "synthesize": "create demonstrations from annotated pictures and clips",
    "refine": "filter demonstrations into training sets: quality, duplicates, gates, recipes",
    "sft": "fine-tune on demonstrations",
    "rft": "reinforcement fine-tuning with pixel operations in the rollouts",
    "ttrl": "adapt to questions without answers by majority vote",
    "ranks": "find a LoRA rank for each layer from a full fine-tune",
    "evaluate": "evaluate a policy on held-out questions",
    "ablate": "compare arms of a recipe over several seeds: means, intervals, tests, curves",
    "rate": "let people compare two policies blindly, and analyse their ratings",
    "answer": "answer a file of questions and write answers with trajectories",
    "serve": "serve the agent over HTTP and learn from its traffic",
    "export": "write a PEFT adapter or a merged Hugging Face model",
    "operate": "run one pixel operation on a picture or clip",
    "audit": "verify and search the audit log of a service",
    "keys": "create, list and revoke the API keys of a service",
    "top": "watch a run or a service live: curves, operations, alarms",
    "trace": "show where the time of a request went, up to the update and promotion that learnt from it",
    "lineage": "print the inputs of a checkpoint, a data set or a result, and verify them",
    "doctor": "check this machine and show how to install what is missing",
    "recipes": "list the recipes, or copy them to a folder",
    "tiny-model": "create a small random Qwen2.5-VL or Qwen3-VL model, offline",
    "completion": "print the shell completion for bash or zsh",
}
"""Job -> its description in `pixelis --help`."""


def overview() -> str:
    jobs = "\n".join(f"  {name:<12} {line}" for name, line in JOBS.items())
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
