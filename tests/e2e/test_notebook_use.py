"""Training from a Python program or notebook: objects in place of paths, on_step, the metrics as a DataFrame, plots."""

from __future__ import annotations

import asyncio
import builtins
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import Config, deterministic, read_metrics, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from spurline import Run, load_config
from spurline.errors import CheckpointError, ConfigError, HookFailedError, UserError
from spurline_insight import notebook
from spurline_insight.notebook import LivePlot, metrics_frame
from spurline_rl.chat_front import ChatFront


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def rl(config: Config, reward: object) -> Config:
    environment = {**config["source"]["environment"], "rewards": reward}
    return config | {"source": {**config["source"], "environment": environment}}


def test_rows_and_a_model_in_memory_train_as_their_files_do_and_a_resume_goes_on_from_them(
    base_config: Config, spurline_chat_file: Path, spurline_tiny_model: Path, tmp_path: Path
) -> None:
    base_config["steps"] = 4
    train(base_config | {"run_dir": str(tmp_path / "files")})
    model = AutoModelForCausalLM.from_pretrained(spurline_tiny_model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(spurline_tiny_model)

    def config() -> Config:
        data = base_config["data"] | {"train": rows_of(spurline_chat_file)}
        return base_config | {"data": data, "model": {"path": model, "tokenizer": tokenizer}}

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            run.request_stop("enough for now")

    run = Run(load_config(config()), on_step=stop)
    assert run.train().status == "stopped"
    assert train(config()).status == "finished"
    assert deterministic(read_metrics(base_config["run_dir"])) == deterministic(read_metrics(tmp_path / "files"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # The record alone is enough to open the run again, from any folder.
    recorded = load_config(json.loads((Path(base_config["run_dir"]) / "config.json").read_text()), recorded=True)
    assert Path(recorded.config.data.train[0].place).is_file()
    changed = base_config["data"] | {"train": rows_of(spurline_chat_file)[:-1]}
    with pytest.raises(CheckpointError, match="data"):
        train(config() | {"data": changed, "steps": 6})


def test_a_model_that_is_an_object_needs_a_tokenizer_and_must_be_one(
    base_config: Config, spurline_tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(spurline_tiny_model)
    with pytest.raises(ConfigError, match=r"model\.tokenizer is required with a model that is an object"):
        load_config(base_config | {"model": {"path": model}})
    with pytest.raises(ConfigError, match=r"model\.path is of type Linear, which is not a model of Hugging Face"):
        load_config(base_config | {"model": {"path": torch.nn.Linear(1, 1), "tokenizer": "t"}})
    model.peft_config = {}
    with pytest.raises(ConfigError, match=r"model\.path has adapters of PEFT.*merge_and_unload"):
        load_config(base_config | {"model": {"path": model, "tokenizer": "t"}})


def test_rl_with_a_closure_runs_inside_an_event_loop_and_resumes_with_the_function_again(rl_config: Config) -> None:
    seen: list[str] = []

    def brevity(answer: Any) -> float:
        seen.append(answer.response)
        return -len(answer.response) / 10

    async def cell(steps: int) -> Any:
        # As in a notebook, whose cells are callbacks of a loop.
        result = train(rl(rl_config, brevity) | {"steps": steps})
        await asyncio.sleep(0)
        return result

    assert asyncio.run(cell(1)).status == "finished"
    first = len(seen)
    assert first >= 16
    assert asyncio.run(cell(2)).step == 2
    assert len(seen) > first
    metrics = read_metrics(rl_config["run_dir"])
    assert [line["step"] for line in metrics] == [1, 2]
    assert metrics[0]["reward/mean"] < 0


def test_rl_trains_in_an_environment_of_a_cell(rl_config: Config, spurline_tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spurline_tiny_model)
    asked: list[str] = []

    async def attempt(task: Any, policy: Any) -> Any:
        chat = ChatFront(policy, tokenizer, [task.row["messages"][0]], where=task.location)
        reply = await chat.reply()
        asked.append(task.uid)
        return policy.finish({"brief": -float(len(reply.text))}, info={"messages": list(chat.messages)})

    source = {**rl_config["source"], "environment": attempt, "reward_weights": {}}
    assert train(rl_config | {"source": source, "steps": 1}).status == "finished"
    assert len(set(asked)) == 4
    assert read_metrics(rl_config["run_dir"])[0]["reward/mean"] < 0
    recorded = json.loads((Path(rl_config["run_dir"]) / "config.json").read_text())
    assert recorded["source"]["environment"]["path"] == "in-memory:attempt"


def test_on_step_gets_every_step_and_an_error_in_it_ends_the_run(base_config: Config) -> None:
    got: list[tuple[int, float]] = []

    class Closing:
        closed = 0

        def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 4:
                raise ValueError("not good")

        def close(self) -> None:
            self.closed += 1

    closing = Closing()
    functions = [lambda step, metrics: got.append((step, metrics["loss"])), closing]
    with pytest.raises(HookFailedError, match=r"on_step.*ValueError: not good"):
        train(base_config, on_step=functions)
    assert [step for step, _ in got] == [1, 2, 3, 4]
    assert closing.closed == 1
    frame = metrics_frame(base_config["run_dir"])
    assert list(frame["loss"]) == [loss for _, loss in got]


def test_the_frame_has_a_row_for_each_step_before_during_and_after_a_run(
    base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    run = Run(load_config(base_config), on_step=lambda step, metrics: lengths.append(len(run.metrics_frame())))
    Path(base_config["run_dir"]).mkdir()
    assert len(run.metrics_frame()) == 0
    run.train()
    assert lengths == [1, 2, 3, 4, 5, 6]
    frame = run.metrics_frame()
    assert frame.index.name == "step"
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame["loss"].iloc[-1] == run.state.metrics["loss"]
    with pytest.raises(UserError, match="no such run directory"):
        metrics_frame(Path(base_config["run_dir"]) / "nothing")
    plain_import = builtins.__import__

    def without_pandas(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return plain_import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(UserError, match="pip install pandas"):
        run.metrics_frame()


def test_outside_of_a_notebook_a_plot_collects_and_draws_only_when_asked(base_config: Config) -> None:
    plot = LivePlot(["loss", "time/*", "no<such"])
    train(base_config, on_step=plot)
    html = plot._repr_html_()
    assert html.count("<svg") == 2
    assert "No step has a metric no&lt;such yet" in html
    with pytest.raises(UserError, match="give names of metrics"):
        LivePlot([])


def test_a_plot_is_replaced_in_place_and_the_last_picture_has_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = pytest.importorskip("IPython.display")
    shown: list[tuple[str, str, str]] = []
    for name in ("display", "update_display"):
        show = lambda picture, display_id, name=name: shown.append((name, display_id, picture.data))  # noqa: E731
        monkeypatch.setattr(ipython, name, show)
    monkeypatch.setattr(notebook, "_is_notebook", lambda: True)
    plot = LivePlot("loss", every_s=3600)
    for run in range(2):
        for step in range(1, 6):
            plot(step, {"loss": 1 / step})
        plot.close()
        (first, id_first, _), (last, id_last, picture) = shown[2 * run :]
        assert (first, last) == ("display", "update_display")
        assert id_first == id_last
        assert picture.split('points="')[1].split('"')[0].count(",") == 5
    assert shown[0][1] != shown[2][1], "a second run gets its own picture"


def test_an_interrupt_stops_and_saves_and_gives_the_handler_back(base_config: Config) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    async def cell(**more: Any) -> Any:
        return train(base_config, **more)

    stopped = asyncio.run(cell(on_step=interrupt))
    assert (stopped.status, stopped.step) == ("stopped", 2)
    assert stopped.checkpoint.name == "step-00000002"
    assert signal.getsignal(signal.SIGINT) is before
    assert asyncio.run(cell()).status == "finished"
