"""Run test targets of the Makefile, two at a time, and report which ones failed and why.

    python tests/lanes.py test-serve test-unit test-chaos test-ray

Starts the targets in the given order, each as soon as a lane is free. The first one, which waits much, has priority over the
others, which use the processors meanwhile.
Shows only their progress; the complete output of each is in runs/tests/TARGET.log. Ends with the failures of each target, one
line per target and the totals.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LANES = 2
"""With three, two processors answer so late that tests of timeouts and kills under load fail."""
NICENESS = 10
"""Of the targets without priority."""
LOGS = Path("runs/tests")
PROGRESS = re.compile(r"\[ *\d+%\]$|^installing ")
CLOSING = re.compile(r"^[= ]*((?:\d+ \w+, )*\d+ \w+) in [\d.]+s")
FAILURES = re.compile(r"^=+ (ERRORS|FAILURES) =+$", re.MULTILINE)
RULE = "=" * 100


@dataclass
class Run:
    """Result of one target."""

    target: str
    seconds: float
    failed: bool
    output: str

    @property
    def closing(self) -> str:
        """pytest's closing counts."""
        counts = [match[1] for line in self.output.splitlines() if (match := CLOSING.match(line))]
        return counts[-1] if counts else "no test result"

    @property
    def reason(self) -> str:
        """pytest's failure report, or the last lines if pytest did not get that far."""
        match = FAILURES.search(self.output)
        return self.output[match.start() :] if match else "\n".join(self.output.splitlines()[-40:])


def run(target: str, niceness: int) -> Run:
    """Run a target. Prints its progress and writes its output to a log."""
    started = time.monotonic()
    command = ["nice", "-n", str(niceness), "make", "--no-print-directory", target]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    with (LOGS / f"{target}.log").open("w", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if PROGRESS.search(line.rstrip()):
                print(f"{target:15} {line}", end="", flush=True)
    failed = process.wait() != 0
    result = Run(target, time.monotonic() - started, failed, (LOGS / f"{target}.log").read_text(encoding="utf-8"))
    print(f"{target:15} {'FAILED' if failed else 'ended'}: {result.closing}, {result.seconds:.0f} s", flush=True)
    return result


def main(targets: list[str]) -> int:
    """Run all targets; returns the exit code."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(LANES) as pool:
        results = list(pool.map(run, targets, [0] + [NICENESS] * (len(targets) - 1)))
    for result in results:
        if result.failed:
            print(
                f"\n{RULE}\n{result.target} failed. Its output is in {LOGS / (result.target + '.log')}\n{RULE}\n{result.reason}"
            )
    print(f"\n{RULE}")
    total: Counter[str] = Counter()
    for result in results:
        print(f"{result.target:15} {'FAILED' if result.failed else 'ok':6} {result.closing}, {result.seconds:.0f} s")
        if result.failed:
            failures = [line for line in result.output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            print("\n".join(f"    {line}" for line in failures or result.output.strip().splitlines()[-1:]))
        total.update({word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", result.closing)})
    print(", ".join(f"{total[word]} {word}" for word in ("passed", "failed", "error", "errors", "skipped") if total[word]))
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
