"""A run that goes on with other settings: what memory and evaluation ask for, and what is allowed by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from async_runs import asynchronous
from run_helpers import Config, Spurline, WriteConfig, read_metrics, train

from spurline import load_config
from spurline.run.directory import RunDirectory
from spurline_insight.report.page import write_run_report


def changed(config: Config, **sections: Config) -> Config:
    """The config with settings of some sections replaced."""
    return {**config, **{name: {**config.get(name, {}), **settings} for name, settings in sections.items()}}


def test_a_run_goes_on_with_less_memory_and_learns_the_same(base_config: Config) -> None:
    whole = train(base_config, name="whole")
    train(base_config, stop_after=3)
    backend = {"max_tokens_per_microbatch": 256, "logits_chunk_tokens": 32, "activation_checkpointing": True}
    run = train(changed(base_config, backend=backend, collator={"max_tokens": 512}))
    assert [line["loss"] for line in run.lines] == pytest.approx([line["loss"] for line in whole.lines], rel=1e-5)


def test_a_run_goes_on_where_a_package_came_or_went(base_config: Config) -> None:
    train(base_config, steps=2)
    assert (
        train(base_config, steps=4, plugins=["-environments", "-rl", "-trackers"], allow_change=["plugins"]).step == 4
    )


def test_an_allowed_change_counts_from_the_checkpoint_on_and_stays_in_the_history(
    spurline: Spurline, write_config: WriteConfig, base_config: Config
) -> None:
    base_config["schedule"] = "constant"
    train(base_config, stop_after=3)
    path = write_config(base_config)
    lower = ("train", path, "--set", "optimizer.learning_rate=1e-4")
    code, _, err = spurline(*lower)
    assert code == 2
    assert "optimizer.learning_rate: 0.001 -> 0.0001" in err
    allowed = " ".join(["spurline", *map(str, lower), "--allow-change", "optimizer.learning_rate"])
    assert allowed in err
    code, out, _ = spurline(*allowed.split()[1:])
    assert code == 0
    assert "optimizer.learning_rate: 0.001 -> 0.0001 (permitted by --allow-change)." in out
    run_dir = Path(base_config["run_dir"])
    assert [line["lr"] for line in read_metrics(run_dir)] == [1e-3] * 3 + [1e-4] * 3
    entry = {"step": 3, "key": "optimizer.learning_rate", "before": 1e-3, "now": 1e-4}
    assert json.loads((run_dir / "summary.json").read_text())["history"] == [entry]
    manifest = json.loads((run_dir / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert manifest["history"] == [entry]
    # And it is carried on by the resumes after that.
    assert spurline(*lower, "--set", "steps=8")[0] == 0
    assert json.loads((run_dir / "summary.json").read_text())["history"] == [entry]
    page = write_run_report(load_config(base_config), RunDirectory(run_dir)).read_text()
    assert "Changed during the run" in page
    assert "after step 3" in page


def test_a_change_that_nobody_made_cannot_be_allowed(
    spurline: Spurline, write_config: WriteConfig, base_config: Config
) -> None:
    path = write_config(base_config)
    code, _, err = spurline("train", path, "--allow-change", "seed")
    assert code == 2
    assert "this is a new run" in err
    train(base_config, stop_after=3)
    code, _, err = spurline("train", path, "--allow-change", "optimizer.eps")
    assert code == 2
    assert "optimizer.eps: no setting of this name has changed" in err


def test_rollouts_go_on_with_another_temperature_and_held_out_settings(
    rl_config: Config, spurline_chat_file: Path
) -> None:
    rl_config["steps"] = 2
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["source"]["held_out"] = {"max_prompts": 4, "success": {"reward": "early"}}
    train(rl_config, stop_after=1)
    source = {**rl_config["source"], "sampling": {"max_new_tokens": 6, "temperature": 0.8}}
    other = changed(rl_config, source={**source, "held_out": {"max_prompts": 3, "success": {"reward": "early"}}})
    assert train(other, allow_change=["source.sampling"]).steps == [1, 2]


@pytest.mark.parametrize(
    "change", [{"max_staleness": 0}, {"sampling": {"max_new_tokens": 6, "temperature": 0.8}}], ids=str
)
def test_finished_groups_that_no_longer_fit_are_made_again(rl_config: Config, change: Config) -> None:
    config = asynchronous(rl_config, max_staleness=3, correction="tis", stall_timeout_s=20)
    config |= {"steps": 4, "checkpoint": {"every_steps": 1}}
    train(config, stop_after=2)
    other = changed(config, source=change)
    run = train(other, allow_change=[f"source.{name}" for name in change])
    assert run.step == 4
    assert max(line["staleness/max"] for line in run.lines[2:]) <= other["source"]["max_staleness"]


def test_other_minibatches_count_on_from_the_optimizer_steps_done(rl_config: Config) -> None:
    """The learning rate goes on along the rest of its schedule, and hooks are told no number twice."""
    told: list[int] = []

    rl_config |= {"steps": 6, "schedule": "cosine"}
    train(rl_config, on_optimizer_step=lambda update: told.append(update), stop_after=4)
    larger = changed(rl_config, minibatches={"prompts_per_minibatch": 4})
    run = train(larger, on_optimizer_step=lambda update: told.append(update), allow_change=["minibatches"])
    assert told == [*range(1, 9), 9, 10]
    rates = [line["lr"] for line in run.lines]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0


def test_a_run_cannot_be_shortened_to_before_its_checkpoint(
    spurline: Spurline, write_config: WriteConfig, base_config: Config
) -> None:
    base_config["schedule"] = "constant"
    path = write_config(base_config)
    assert spurline("train", path)[0] == 0
    shorter = ("train", path, "--set", "steps=5", "--allow-change", "steps")
    code, _, err = spurline(*shorter)
    assert code == 2
    assert "steps gives 5 steps, but the checkpoint is at step 6. Raise steps" in err
    earlier = Path(base_config["run_dir"]) / "checkpoints" / "step-00000004"
    code, out, _ = spurline(*shorter, "--resume", earlier)
    assert code == 0
    assert "superseded-step-00000006" in out
    assert "Finished at step 5." in out
