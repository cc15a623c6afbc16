"""Run test targets of the Makefile, two at a time, and report which ones failed and why.

    python tests/lanes.py install-vllm test-serve test-vllm --beside lint test-unit

The first target, which answers clients in time, has priority. Tests on real clusters wait more than they
compute: the targets after ``--beside``, which only compute, run one after another in the processors' idle
time. ``install-NAME``, which mostly waits for network and disk, runs beside both, and ``test-NAME`` begins when
it has ended. A few failed tests are run once more, alone: two real clusters on two processors are slower than
any limit allows for. The complete output of each target is in runs/tests/TARGET.log.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

LANES = 2
"""With three clusters, two processors answer so late that tests of timeouts and kills under load fail."""
NICENESS = 5
"""Of the targets without priority."""
IDLE = 10
"""Niceness of the targets that run in idle time."""
REPEATED = 3
"""More failed tests than these, of all targets together, are not the machine's fault."""
INSTALL = "install-"
"""Prefix of the targets that run beside the lanes."""
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
    def minutes(self) -> str:
        """How long the target took."""
        return f"{self.seconds // 60:.0f}:{self.seconds % 60:02.0f} min"

    @property
    def closing(self) -> str:
        """pytest's closing counts."""
        counts = [match[1] for line in self.output.splitlines() if (match := CLOSING.match(line))]
        return counts[-1] if counts else "no test result"

    @property
    def failures(self) -> list[str]:
        """pytest's line for each failed test."""
        return [line for line in self.output.splitlines() if line.startswith(("FAILED ", "ERROR "))]

    @property
    def reason(self) -> str:
        """pytest's failure report, or the last lines if pytest did not get that far."""
        match = FAILURES.search(self.output)
        return self.output[match.start() :] if match else "\n".join(self.output.splitlines()[-40:])


def run(target: str, niceness: int, again: bool = False) -> Run:
    """Run a target, or ``again`` those of its tests that failed; print its progress, log its output."""
    started = time.monotonic()
    command = ["nice", "-n", str(niceness), "make", "--no-print-directory", target]
    options = f"-o cache_dir=.pytest_cache/{target}" + " --last-failed --lfnf=none" * again
    # Ray's workers would otherwise add 15 to it, and be no more urgent than what runs in idle time.
    env = {**os.environ, "PYTEST_ADDOPTS": options, "RAY_worker_niceness": "0"}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    path = LOGS / f"{target}{'-again' * again}.log"
    with path.open("w", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if PROGRESS.search(line.rstrip()):
                print(f"{target:15} {line}", end="", flush=True)
    failed = process.wait() != 0
    result = Run(target, time.monotonic() - started, failed, path.read_text(encoding="utf-8"))
    print(f"{target:15} {'FAILED' if failed else 'ended'}: {result.closing}, {result.minutes}", flush=True)
    return result


def main(targets: list[str], beside: list[str]) -> int:
    """Run all targets; returns the exit code."""
    LOGS.mkdir(parents=True, exist_ok=True)
    tests = [target for target in targets if not target.startswith(INSTALL)]
    with ThreadPoolExecutor(LANES) as pool, ThreadPoolExecutor(1) as idle, ThreadPoolExecutor() as network:
        installations = [target for target in targets if target.startswith(INSTALL)]
        installed = {target: network.submit(run, target, NICENESS) for target in installations}

        def run_when_installed(target: str, niceness: int) -> Run:
            installation = installed.get(INSTALL + target.removeprefix("test-"))
            if installation is not None and (result := installation.result()).failed:
                return replace(result, target=target)
            return run(target, niceness)

        in_idle_time = idle.map(run, beside, [IDLE] * len(beside))
        results = list(pool.map(run_when_installed, tests, [0] + [NICENESS] * (len(tests) - 1)))
        results += in_idle_time
    failed = [result for result in results if result.failed]
    unsteady = dict[str, list[str]]()
    few = sum(len(result.failures) for result in failed) <= REPEATED
    if few and all(result.failures for result in failed):
        passed = [result for result in failed if not run(result.target, 0, again=True).failed]
        unsteady = {result.target: result.failures for result in passed}
    for result in failed:
        outcome = "failed, and passed when run again alone" if result.target in unsteady else "failed"
        place = LOGS / f"{result.target}.log"
        print(f"\n{RULE}\n{result.target} {outcome}. Its output is in {place}\n{RULE}\n{result.reason}")
    print(f"\n{RULE}")
    total: Counter[str] = Counter()
    for result in results:
        outcome = "AGAIN" if result.target in unsteady else "FAILED" if result.failed else "ok"
        print(f"{result.target:15} {outcome:6} {result.closing}, {result.minutes}")
        if result.failed:
            lines = result.failures or result.output.strip().splitlines()[-1:]
            print("\n".join(f"    {line}" for line in lines))
        for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", result.closing):
            total[word] += int(number)
    words = "passed", "failed", "error", "errors", "skipped"
    print(", ".join(f"{total[word]} {word}" for word in words if total[word]))
    for target, failures in unsteady.items():
        reason = "passed when run again alone, as if the machine had been too busy:"
        print(f"{target}: {reason}", *failures, sep="\n    ")
    return int(len(failed) > len(unsteady))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--beside", nargs="+", default=[])
    arguments = parser.parse_args()
    sys.exit(main(arguments.targets, arguments.beside))
