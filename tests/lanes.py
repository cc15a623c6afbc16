"""Run test lanes side by side and say at the end which one failed and why.

    python tests/lanes.py test-ray test-vllm,test-unit

A lane is one or more targets of the Makefile, run one after another; all lanes but the first give way to it. While they run, only
their progress is shown. The whole output of each target is in runs/tests/TARGET.log. At the end the failures of each target are
printed together, then one line for each target and the sum.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LOGS = Path("runs/tests")
PROGRESS = re.compile(r"\[ *\d+%\]$|^installing ")
CLOSING = re.compile(r"^[= ]*((?:\d+ \w+, )*\d+ \w+) in [\d.]+s")
FAILURES = re.compile(r"^=+ (ERRORS|FAILURES) =+$", re.MULTILINE)
RULE = "=" * 100


@dataclass
class Run:
    """One target that has ended."""

    target: str
    seconds: float
    failed: bool
    output: str

    @property
    def closing(self) -> str:
        """What pytest counted, or that it did not get that far."""
        counted = [found[1] for line in self.output.splitlines() if (found := CLOSING.match(line))]
        return counted[-1] if counted else "no test result"

    @property
    def reason(self) -> str:
        """pytest's report from its first failure on, or the last lines of what ended before."""
        found = FAILURES.search(self.output)
        return self.output[found.start() :] if found else "\n".join(self.output.splitlines()[-40:])


def run(target: str, niceness: int) -> Run:
    """Run a target; its progress goes to the terminal, everything to its log."""
    began = time.monotonic()
    command = ["nice", "-n", str(niceness), "make", "--no-print-directory", target]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    with (LOGS / f"{target}.log").open("w", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if PROGRESS.search(line.rstrip()):
                print(f"{target:10} {line}", end="", flush=True)
    failed = process.wait() != 0
    result = Run(target, time.monotonic() - began, failed, (LOGS / f"{target}.log").read_text(encoding="utf-8"))
    print(f"{target:10} {'FAILED' if failed else 'ended'}: {result.closing}, {result.seconds:.0f} s", flush=True)
    return result


def main(lanes: list[str]) -> int:
    """The exit code of all."""
    LOGS.mkdir(parents=True, exist_ok=True)
    results: list[Run] = []

    def follow(lane: str, niceness: int) -> None:
        for target in lane.split(","):
            results.append(run(target, niceness))

    threads = [threading.Thread(target=follow, args=(lane, 19 if place else 0)) for place, lane in enumerate(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if result.failed:
            print(f"\n{RULE}\n{result.target} failed. All of it is in {LOGS / (result.target + '.log')}\n{RULE}\n{result.reason}")
    print(f"\n{RULE}")
    total: Counter[str] = Counter()
    for result in results:
        print(f"{result.target:10} {'FAILED' if result.failed else 'ok':6} {result.closing}, {result.seconds:.0f} s")
        if result.failed:
            named = [line for line in result.output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            print("\n".join(f"    {line}" for line in named or result.output.strip().splitlines()[-1:]))
        total.update({word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", result.closing)})
    print(", ".join(f"{total[word]} {word}" for word in ("passed", "failed", "error", "errors", "skipped") if total[word]))
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
