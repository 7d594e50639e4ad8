"""What a hook can do with the run: evaluate, export, stop, keep state; and what it is told when it may not."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_helpers import Config, read_metrics, train
from transformers import AutoModelForCausalLM

from spurline import Run, load_config
from spurline.errors import PluginError, RunFailedError, UserError
from spurline.plugins import hookimpl
from spurline.run.evaluations.evaluation import DataEvaluation


class Acting:
    """Calls a function with the run at one hook."""

    def __init__(self, hook: str, act: Callable[[Run], object], at_step: int | None = None) -> None:
        self._hook, self._act, self._at_step = hook, act, at_step

    def _do(self, hook: str, step: int | None = None) -> None:
        if hook == self._hook and (self._at_step is None or step == self._at_step):
            self._act(self._run)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._run = run
        self._do("on_run_start")

    @hookimpl
    def on_step_start(self, step: int) -> None:
        self._do("on_step_start", step)

    @hookimpl
    def on_eval_end(self, step: int) -> None:
        self._do("on_eval_end", step)

    @hookimpl
    def on_step_end(self, step: int) -> None:
        self._do("on_step_end", step)

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        self._do("on_run_end")


@pytest.fixture
def evaluated_config(base_config: Config, spurline_chat_file: Path) -> Config:
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 3}
    return base_config


def test_an_evaluation_by_a_hook_is_recorded_under_its_prefix_with_the_step_it_belongs_to(
    evaluated_config: Config,
) -> None:
    returned: list[dict[str, float]] = []
    train(
        evaluated_config,
        Acting("on_step_start", lambda run: returned.append(run.evaluate("before")), at_step=2),
        Acting("on_eval_end", lambda run: returned.append(run.evaluate("again"))),
        Acting("on_step_end", lambda run: returned.append(run.evaluate("after")), at_step=2),
    )
    metrics = read_metrics(evaluated_config["run_dir"])
    assert [line["step"] for line in metrics if "before/loss" in line] == [2]
    assert [line["step"] for line in metrics if "again/loss" in line] == [3, 6]
    assert not any("after/loss" in line for line in metrics), "the step had been recorded"
    assert all(line["again/loss"] == line["eval/loss"] for line in metrics if "eval/loss" in line)
    assert metrics[1]["before/loss"] == returned[0]["before/loss"] > metrics[2]["eval/loss"]
    assert set(returned[1]) == {"after/loss", "after/time"}


def test_a_run_that_had_finished_is_evaluated_when_a_hook_asks_for_it(evaluated_config: Config) -> None:
    returned: list[dict[str, float]] = []
    for _ in range(2):
        train(evaluated_config, Acting("on_run_end", lambda run: returned.append(run.evaluate("end"))))
    assert returned[0]["end/loss"] == returned[1]["end/loss"]


def test_rollouts_of_swapped_parameters_are_theirs_and_training_goes_on_as_without_them(
    rl_config: Config, spurline_chat_file: Path
) -> None:
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["source"]["held_out"] = {"max_prompts": 8, "success": {"reward": "early"}}
    rl_config |= {"steps": 4, "optimizer": {"learning_rate": 1e-2}, "evaluation": {"every_steps": 2}}
    whole = train(rl_config, name="whole")
    kept: dict[str, torch.Tensor] = {}
    told: list[int] = []

    def keep(run: Run) -> None:
        backend: Any = run.backend
        kept.update({name: value.clone() for name, value in backend.trained_parameters().items()})
        run.evaluate("first")

    def compare(run: Run) -> None:
        run.evaluate("now")
        backend: Any = run.backend
        with backend.swapped("policy", kept):
            run.evaluate("then")

    hooks = (Acting("on_step_start", keep, at_step=1), Acting("on_eval_end", compare, at_step=4))
    run = train(rl_config, *hooks, on_optimizer_step=lambda update: told.append(update))
    lines = run.without_times
    for name in ("reward", "rewards/early"):
        assert lines[3][f"now/{name}"] == lines[3][f"eval/{name}"] != lines[0][f"first/{name}"]
        assert lines[3][f"then/{name}"] == lines[0][f"first/{name}"]
    added = ("first/", "now/", "then/")
    own = [{name: value for name, value in line.items() if not name.startswith(added)} for line in lines]
    assert own == whole.without_times
    assert told == [1, 2, 3, 4, 5, 6, 7, 8]


def evaluate_twice(run: Run) -> None:
    run.evaluate("ema")
    run.evaluate("ema")


@pytest.mark.parametrize(
    ("hook", "act", "message"),
    [
        ("on_run_start", lambda run: run.evaluate("ema"), "was called before the run started its source"),
        ("on_step_start", lambda run: run.evaluate("eval"), "a prefix has only letters"),
        ("on_step_start", lambda run: run.evaluate("a/b"), "a prefix has only letters"),
        ("on_eval_end", evaluate_twice, "this step already has a 'ema/loss'"),
    ],
)
def test_an_evaluation_that_cannot_be_made_is_refused(
    evaluated_config: Config, hook: str, act: Callable[[Run], object], message: str
) -> None:
    with pytest.raises((UserError, RunFailedError), match=rf"run\.evaluate.*{message}"):
        train(evaluated_config, Acting(hook, act))


def test_an_evaluation_under_the_prefix_of_other_metrics_does_not_replace_them(evaluated_config: Config) -> None:
    class Adds:
        @hookimpl(wrapper=True)
        def train_step(self) -> Generator[None, dict[str, float], dict[str, float]]:
            return {**(yield), "mine/loss": 1.0}

    with pytest.raises(UserError, match=r"run\.evaluate: the step itself has a metric 'mine/loss'"):
        train(evaluated_config, Adds(), Acting("on_step_start", lambda run: run.evaluate("mine")))


def test_an_evaluation_without_held_out_data_says_what_to_set(base_config: Config) -> None:
    with pytest.raises(UserError, match=r"data\.eval is empty, but run\.evaluate\('ema'\) needs held-out data"):
        train(base_config, Acting("on_step_start", lambda run: run.evaluate("ema")))


def test_a_hook_exports_the_weights_of_the_moment_into_a_free_folder(base_config: Config, tmp_path: Path) -> None:
    weights: list[dict[str, torch.Tensor]] = []

    def export(run: Run) -> None:
        weights.append({name: tensor.clone() for name, tensor in run.backend.named_weights()})
        assert run.export(tmp_path / "out") == tmp_path / "out"
        with pytest.raises(UserError, match="exists and is not empty"):
            run.export(tmp_path / "out")
        run.export(str(tmp_path / "out"), replace=True)

    train(base_config, Acting("on_step_end", export, at_step=2))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights[0].items())


class Counter:
    """Keeps how many steps it has seen, and a number of each."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.updates: list[int] = []

    def state_dict(self) -> dict[str, object]:
        return {"steps": np.array(self.steps, np.int64), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.updates = state["steps"].tolist(), list(state["updates"])

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        run.keep_state("seen", self)

    @hookimpl
    def on_optimizer_step(self, update: int, role: str) -> None:
        assert role == "policy"
        self.updates.append(update)

    @hookimpl
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)


def test_a_step_whose_evaluation_failed_reaches_hooks_once_all_the_same(
    evaluated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Counter()

    def broken(*_: object) -> None:
        raise RunFailedError("no answer")

    evaluated_config["evaluation"] = {"every_steps": 5}
    with monkeypatch.context() as patch:
        patch.setattr(DataEvaluation, "evaluate", broken)
        with pytest.raises(RunFailedError, match="no answer"):
            train(evaluated_config, Counter())
    train(evaluated_config, seen)
    assert seen.steps == [1, 2, 3, 4, 5, 6]


def test_a_program_may_keep_state_before_it_trains_and_notes_say_what_is_new_or_left(
    base_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(base_config | {"steps": 2})
    first = Counter()
    first.steps = [7]
    run.keep_state("own", first)
    run.train()
    run = Run(base_config | {"steps": 4})
    second = Counter()
    run.keep_state("own", second)
    run.keep_state("other", Counter())
    run.train()
    assert second.steps == [7]
    assert "The state 'other' is new in this run." in capsys.readouterr().out
    train(base_config)
    assert "The checkpoint has the state 'own', which nothing in this run uses" in capsys.readouterr().out


def test_what_exists_only_while_a_run_trains_says_so_before(base_config: Config) -> None:
    run = Run(load_config(base_config))
    for name in ("backend", "source", "tokenizer", "batches"):
        with pytest.raises(AttributeError, match=f"Run.{name} exists only while"):
            getattr(run, name)
    with pytest.raises(AttributeError, match="'Run' object has no attribute 'trainer'"):
        run.trainer  # noqa: B018


@pytest.mark.parametrize("made", ["a text", {"report": Path("other.html")}])
def test_files_of_a_record_that_are_no_mapping_or_take_a_name_are_told(base_config: Config, made: Any) -> None:
    with pytest.raises(PluginError, match="on_run_recorded returned"):
        train(base_config, steps=2, on_run_recorded=lambda: made)
