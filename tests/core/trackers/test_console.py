"""What the terminal and log files show."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rl_run_record import rl_metrics

from spurline.protocols.tracker import RunInfo
from spurline.trackers.configs import ConsoleTrackerConfig
from spurline.trackers.console import ConsoleTracker


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def metrics(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 2.0 / step, "lr": 3e-4, "grad_norm": 0.5, "tokens": 6150, "time/step": 0.5} | more


def plain_lines(*logged: dict[str, float], every_steps: int = 1000, warns: str | None = None) -> list[str]:
    """Return what a log file shows of these metrics, each followed by a warning of this kind if one is given."""
    output = io.StringIO()
    tracker = ConsoleTracker(ConsoleTrackerConfig(every_steps=every_steps), Console(file=output))
    tracker.start(RunInfo(Path("runs/a"), 0, 200, {}))
    for line in logged:
        step = int(line["step"])
        tracker.log(step, {name: value for name, value in line.items() if name != "step"})
        if warns is not None:
            tracker.warn(step, warns, f"Something is off: [{warns}].")
    tracker.close()
    return output.getvalue().splitlines()


def test_a_plain_line_reads_step_loss_rate_speed_and_time_left() -> None:
    first, second = plain_lines(metrics(1), metrics(2), every_steps=1)
    assert first == "step 1/200  loss 2.000  12.3k tokens/s  lr 3.0e-04  grad 0.50", "the first step has no ETA"
    assert re.fullmatch(r"step 2/200  loss \d\.\d{3}  ETA 0:01:\d\d  \S+ tokens/s  lr 3\.0e-04  grad 0\.50", second)


def test_plain_lines_come_first_then_every_so_many_steps_and_last() -> None:
    lines = plain_lines(*map(metrics, range(1, 201)), every_steps=60)
    assert [line.split()[1] for line in lines] == ["1/200", "60/200", "120/200", "180/200", "200/200"]


def test_names_and_notes_of_others_can_neither_steer_the_terminal_nor_be_read_as_markup() -> None:
    output = io.StringIO()
    tracker = ConsoleTracker(ConsoleTrackerConfig(), Console(file=output, force_terminal=True))
    tracker.start(RunInfo(Path("runs/a"), 0, 3, {}, ("\x1b]0;mine\x07 [red]x[/red] :smile: \u009b2J\ud83d",)))
    tracker.log(1, metrics(1, **{"eval/\x1b[2J": 0.5}))
    tracker.close()
    assert not {"\x1b", "\x07", "\u009b", "\ud83d"} & set(output.getvalue())
    assert output.getvalue().startswith(r"\x1b]0;mine\x07 [red]x[/red] :smile: \x9b2J\ud83d")
    assert r"eval at step 1/3  \x1b[2J 0.5" in output.getvalue()


def test_metrics_without_loss_or_times_still_print_the_step() -> None:
    output = io.StringIO()
    tracker = ConsoleTracker(ConsoleTrackerConfig(), Console(file=output))
    tracker.log(1, {})
    tracker.close()
    tracker.close()
    assert output.getvalue() == "step 1\n"


@pytest.mark.parametrize("width", [30, 60, 80, 140])
def test_a_terminal_shows_a_bar_with_loss_and_evaluations_above_it(width: int) -> None:
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    tracker = ConsoleTracker(ConsoleTrackerConfig(), console)
    tracker.start(RunInfo(Path("runs/a"), 0, 3, {}))
    tracker.log(1, metrics(1))
    tracker.log(2, metrics(2, **{"eval/loss": 1.5}))
    tracker.log(3, metrics(3))
    tracker.close()
    shown = terminal.getvalue()
    assert "step 3/3" in shown
    assert "eval at step 2/3  loss 1.5\n" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "━" in shown
    assert shown.rstrip("\n").endswith("\x1b[?25h")
    last_bar = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.splitlines()[-2])
    if width >= 60:
        assert "loss 0.667" in last_bar
    if width == 140:
        assert "grad 0.50" in last_bar


def test_a_step_of_pairs_reads_accuracy_and_margin_beside_the_loss() -> None:
    (line,) = plain_lines(metrics(1, **{"preference/accuracy": 0.625, "preference/margin": -0.0315}))
    assert line.startswith("step 1/200  loss 2.000  accuracy 62%  margin -0.032  12.3k tokens/s")


def test_a_step_of_rollouts_reads_reward_equal_groups_and_both_speeds_and_no_loss() -> None:
    line = plain_lines(rl_metrics(1), rl_metrics(2), every_steps=1)[1]
    speeds = "gen 4.00k, train 8.00k tokens/s"
    assert line.startswith(f"step 2/200  reward 0.420  equal groups 25%  ETA 0:06:36  {speeds}  lr 5.0e-04")


def test_a_line_of_an_asynchronous_step_tells_the_age_of_its_tokens_in_updates() -> None:
    assert "reward 0.410  age 1.5  equal groups" in plain_lines(rl_metrics(1, staleness__mean=1.5))[0]
    assert "age" not in plain_lines(rl_metrics(1))[0]


def test_pass_rates_are_printed_as_percent_and_rewards_as_numbers() -> None:
    evaluated = {"eval/pass@1": 0.953, "eval/pass@4": 1.0, "eval/reward": 0.87, "eval/time": 1.0}
    assert plain_lines(rl_metrics(1) | evaluated)[1] == "eval at step 1/200  pass@1 95.3%  pass@4 100.0%  reward 0.87"


def test_a_warning_is_printed_when_it_first_appears_and_then_at_most_every_50_steps() -> None:
    lines = plain_lines(*map(metrics, range(3, 120)), warns="cut")
    assert [line for line in lines if line.startswith("warning")] == [
        f"warning at step {step}/200: Something is off: [cut]." for step in (3, 53, 103)
    ]


def test_training_goes_on_when_nobody_reads_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        tracker = ConsoleTracker(ConsoleTrackerConfig(every_steps=1))
        tracker.start(RunInfo(Path("runs/a"), 0, 200, {}))
        for step in range(1, 4):
            tracker.log(step, metrics(step))
        tracker.close()
