"""Run a part of the tests in `tests/gpu`, and print the counts and failures after every test.

The tests of a class stay together, because they share what took long to start. `--part 2/3` runs every third group,
beginning with the second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Progress:
    """A plugin for pytest that chooses the part, and prints figures."""

    def __init__(self, part: int, parts: int) -> None:
        self._part, self._parts = part, parts
        self._began = time.perf_counter()
        self.counts = {"passed": 0, "failed": 0, "skipped": 0, "left": 0}
        self.failures: dict[str, str] = {}
        self.reasons: dict[str, int] = {}
        self.slowest: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        groups = list(dict.fromkeys(self._group(item) for item in items))
        items[:] = [item for item in items if groups.index(self._group(item)) % self._parts == self._part - 1]
        self.counts["left"] = len(items)

    @staticmethod
    def _group(item: Any) -> str:
        return item.nodeid.split("::")[1] if item.cls else item.nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.split("/")[-1]
        if report.when == "call" and report.passed:
            self.counts["passed"] += 1
            self.slowest[name] = round(report.duration, 1)
        elif report.failed:
            self.counts["failed"] += 1
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.failures[name] = "\n".join(lines[:4] or str(report.longrepr).splitlines()[-3:])
        elif report.skipped:
            self.counts["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if report.when == "teardown":
            self.counts["left"] -= 1
            self.show()

    def pytest_collectreport(self, report: Any) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def show(self) -> None:
        """Print the figures as they are now."""
        slowest = dict(sorted(self.slowest.items(), key=lambda pair: -pair[1])[:5])
        more = {"failures": self.failures, "why_skipped": self.reasons, "slowest_s": slowest}
        print("\n" + json.dumps({**self.counts, **more}), flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", help="files or folders below the repository's root")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("-k", dest="chosen", default="")
    parser.add_argument("--timeout", type=int, default=100, help="seconds for one test")
    given = parser.parse_args(arguments)
    import pytest

    part, parts = map(int, given.part.split("/"))
    progress = Progress(part, parts)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-ra", "-p", "no:cacheprovider", "--basetemp", f"{folder}/tests"]
        options += ["--timeout", str(given.timeout)] if has("pytest_timeout") else []
        options += ["-n", "0"] if has("xdist") else []
        code = pytest.main([*given.paths, *options, "-k", given.chosen], plugins=[progress])
    progress.show()
    # No test at all is no failure: the file's library may be missing, which the figures say.
    sys.exit(0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else int(code))


def has(module: str) -> bool:
    return find_spec(module) is not None
