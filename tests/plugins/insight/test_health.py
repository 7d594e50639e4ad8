"""What is said of a run that goes wrong, and that nothing is said of one that goes well."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rl_run_record import rl_metrics

from spurline import Run, load_config
from spurline.cli import main
from spurline_insight.health import HealthWatch, findings
from spurline_insight.report.panels.summary import HealthPanel
from spurline_insight.report.record import read_record
from spurline_insight.report_panel import ReportPanelConfig

Lines = list[dict[str, Any]]
CONFIG = {"optimizer": {"max_grad_norm": 1.0}}


def lines_of(losses: Sequence[float], norms: Sequence[float] | float = 0.8, lr: float = 1e-4) -> Lines:
    grads = [norms] * len(losses) if isinstance(norms, float) else norms
    return [
        {"step": step, "loss": loss, "grad_norm": norm, "lr": lr}
        for step, (loss, norm) in enumerate(zip(losses, grads, strict=True), start=1)
    ]


def kinds(lines: Lines, config: dict[str, Any] = CONFIG) -> set[str]:
    return {finding.kind for finding in findings(lines, config)}


def noisy(mean: Callable[[int], float], deviation: float, count: int = 300, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [max(0.01, mean(step) + draw.gauss(0, deviation)) for step in range(count)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("mean", "deviation"),
    [
        (lambda step: 0.3 + 4 * math.exp(-step / 30), 0.05),
        (lambda step: 2.0, 0.3),
        (lambda step: 1.2 - step / 600, 0.15),
        (lambda step: 0.02 + 0.6 * math.exp(-step / 60), 0.02),
        (lambda step: 5.7 if step < 20 else 5.7 * math.exp(-(step - 20) / 40), 0.1),
    ],
    ids=["learns", "plateau of noisy batches", "fine-tuning", "preferences", "slow warm-up"],
)
def test_nothing_is_said_of_healthy_losses(mean: Callable[[int], float], deviation: float, seed: int) -> None:
    norms = noisy(lambda step: 0.5 + 10 * math.exp(-step / 20), 0.1, seed=seed)
    assert kinds(lines_of(noisy(mean, deviation, seed=seed), norms)) == set()


@pytest.mark.parametrize(
    "losses",
    [
        [5.7, 30.0, 800.0, 13_419.0],
        [5.7, *(5.0 - step / 10 for step in range(20)), *(13_419.0 for _ in range(5))],
        [2.0] * 30 + [2.0 + step / 5 for step in range(30)],
        [0.69] * 20 + [2.5] * 6,
    ],
    ids=["at once", "after a while", "slowly", "of pairs"],
)
def test_a_loss_that_leaves_for_good_has_diverged_and_belongs_to_how_the_run_ended(losses: list[float]) -> None:
    [finding] = [found for found in findings(lines_of(losses), CONFIG) if found.kind == "diverged"]
    assert finding.lasts
    assert finding.steps[-1] == len(losses)
    assert f"The loss is at {sorted(losses[-5:])[-3]:.4g}"[:20] in finding.words or len(losses) < 5
    assert "Lower optimizer.learning_rate" in finding.words


def test_one_jump_of_the_loss_is_a_spike_and_passes_by() -> None:
    losses = noisy(lambda step: 2.0, 0.05, count=60)
    losses[30] = 9.0
    [finding] = findings(lines_of(losses), CONFIG)
    assert (finding.kind, finding.steps, finding.lasts) == ("loss_spike", (31,), False)
    assert finding.when == "Step 31 (1 of 60)"


def test_a_loss_that_came_back_is_told_but_is_not_how_the_run_ended() -> None:
    losses = [3.0] * 60 + [40.0] * 5 + [2.9 - step / 1000 for step in range(200)]
    found = {finding.kind: finding.lasts for finding in findings(lines_of(losses), CONFIG)}
    assert found["diverged"] is False


@pytest.mark.parametrize(
    ("norms", "kind"),
    [
        ([0.8] * 30 + [90.0] + [0.8] * 9, "gradient_spike"),
        ([5e4] * 40, "huge_gradient"),
        ([0.8] * 20 + [0.0] * 20, "no_gradient"),
    ],
)
def test_what_is_wrong_with_gradients_is_told(norms: list[float], kind: str) -> None:
    lines = lines_of(noisy(lambda step: 2.0, 0.05, count=len(norms)), norms)
    assert kind in kinds(lines)


def test_a_learning_rate_of_zero_is_told() -> None:
    assert kinds(lines_of([2.5] * 12, lr=0.0)) == {"no_learning_rate"}
    warmed_up = lines_of([2.5, 2.4, 2.3, 2.2])
    warmed_up[0]["lr"] = 0.0
    assert kinds(warmed_up) == set()


def test_the_loss_of_a_policy_is_not_judged_and_its_rollouts_are() -> None:
    lines = [rl_metrics(step) | {"loss": 10.0**step, "grad_norm": 0.0} for step in range(1, 12)]
    assert kinds(lines) == set()
    lines[-1]["response/share_length"] = 0.9
    assert kinds(lines) == {"cut_off"}


@pytest.mark.parametrize(
    ("shares", "is_told"), [([0.95] * 5, True), ([0.5, 0.99, 0.5] * 3, False), ([0.95] * 4, False)]
)
def test_an_event_loop_that_stays_busy_is_told(shares: list[float], is_told: bool) -> None:
    lines = [{"step": step, "controller/cpu_share": share} for step, share in enumerate(shares, start=1)]
    found = findings(lines, CONFIG)
    assert [finding.kind for finding in found] == ["busy_controller"] * is_told
    assert all("95% of the time" in finding.words for finding in found)
    assert all("source.engine.placement: ray" in finding.words for finding in found)


def test_a_watch_fed_step_by_step_says_what_the_report_says() -> None:
    lines = lines_of([5.7, *(5.0 for _ in range(20)), *(400.0 for _ in range(10))])
    watch = HealthWatch(CONFIG)
    live = [(line["step"], kind) for line in lines for kind in watch.judge(line["step"], line)]
    assert set(live) == {(step, found.kind) for found in findings(lines, CONFIG) for step in found.steps}


@pytest.fixture
def diverging(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    """Supervised fine-tuning at a rate that no model survives."""
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "max_length": 128},
        "batch_size": 8,
        "steps": 12,
        "optimizer": {"learning_rate": 30.0, "max_grad_norm": None},
        "schedule": "constant",
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
    }


def test_a_run_that_diverged_says_so_live_at_its_end_in_its_summary_and_in_its_report(
    diverging: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.json.yaml"
    config.write_text(json.dumps(diverging))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(config)])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "warning at step " in out
    assert "Finished at step 12, with warnings:\n  - The loss is at " in out
    assert "training has diverged" in out.partition("with warnings")[2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [warning["lasts"] for warning in summary["warnings"] if warning["kind"] == "diverged"] == [True]
    panel = HealthPanel(ReportPanelConfig(name="health")).render(read_record(tmp_path / "run"))
    assert panel is not None
    assert "training has diverged" in panel


def test_a_run_that_goes_well_ends_without_a_warning(diverging: dict[str, Any]) -> None:
    result = Run(load_config(diverging | {"optimizer": {"learning_rate": 1e-3}})).train()
    assert result.warnings == ()


def test_a_resumed_run_is_compared_with_what_was_before(
    diverging: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Run(load_config(diverging | {"optimizer": {"learning_rate": 0.0}, "steps": 2})).train()
    capsys.readouterr()
    result = Run(load_config(diverging | {"optimizer": {"learning_rate": 0.0}, "steps": 4})).train()
    # Three steps without a learning rate, two of them before the resume.
    assert "warning at step 3/4: The learning rate is 0" in capsys.readouterr().out
    assert any("learning rate is 0" in words for words in result.warnings), "the end looks at the whole run"
