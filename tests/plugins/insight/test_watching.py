"""What is off at a step is said while the run trains, and what was off in the whole run at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl_run_record import rl_metrics

from spurline.plugins.host import PluginHost
from spurline.plugins.run_view import Warned
from spurline_insight.health import Watcher


class WatchedRun:
    """What a watcher sees of a run. done: lines of metrics.jsonl that a resumed run goes on from."""

    def __init__(self, folder: Path, done: list[dict[str, Any]] | None = None) -> None:
        self.host = PluginHost.load([])
        self.loaded = SimpleNamespace(host=self.host, resolved=lambda: {"steps": 200})
        self.directory = SimpleNamespace(metrics=folder / "metrics.jsonl")
        self.warned: list[tuple[int, str, str]] = []
        lines = done or []
        self.state = SimpleNamespace(step=len(lines), checkpoint=folder if lines else None)
        self.directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        Watcher(self)  # type: ignore[arg-type]

    def warn(self, step: int, kind: str, words: str) -> None:
        self.warned.append((step, kind, words))

    def add_judge(self, judge: Callable[[], Sequence[Warned]]) -> None:
        self.judge = judge

    def train(self, *steps: dict[str, Any]) -> None:
        with self.directory.metrics.open("a") as file:
            for line in steps:
                file.write(json.dumps(line) + "\n")
        for line in steps:
            metrics = {name: value for name, value in line.items() if name != "step"}
            self.host.hooks.on_step_end(step=line["step"], metrics=metrics)


def test_what_is_off_is_said_at_each_step_with_its_kind(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    run.train(*(rl_metrics(step, response__share_length=0.4 + step / 1000) for step in range(3, 6)))
    assert [step for step, _, _ in run.warned] == [3, 4, 5]
    assert len({kind for _, kind, _ in run.warned}) == 1
    assert run.warned[0][2].startswith("40% of responses were cut off at the token limit.")


def test_another_trouble_has_another_kind(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    run.train(rl_metrics(1, response__share_length=0.4), rl_metrics(2, groups__quarantined=1.0))
    assert [step for step, _, _ in run.warned] == [1, 2]
    assert len({kind for _, kind, _ in run.warned}) == 2


def test_a_healthy_run_is_told_nothing(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    run.train(*(rl_metrics(step) for step in range(1, 5)))
    assert (run.warned, list(run.judge())) == ([], [])


def test_the_end_says_what_was_off_in_the_whole_run(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, [rl_metrics(step, response__share_length=0.5) for step in (1, 2)])
    run.train(*(rl_metrics(step, response__share_length=0.5) for step in (3, 4)))
    assert any("cut off" in each.words for each in run.judge())
