"""Training from a program or notebook: objects in place of paths, `on_step`, plots, and `examples/notebook.ipynb`."""

from __future__ import annotations

import ast
import asyncio
import builtins
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from run_helpers import Config, Trained, read_metrics, train, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from spurline import Run, load_config
from spurline.errors import CheckpointError, ConfigError, HookFailedError, RunDirectoryError, UserError
from spurline.trackers.jsonl import METRICS_FILE, read_json_lines
from spurline_insight import notebook
from spurline_insight.notebook import LivePlot, metrics_frame
from spurline_rl.chat_front import ChatFront

EXAMPLES = Path(__file__).parents[2] / "examples"

# What a person would do in the notebook's next cell: train on, and press the button that interrupts.
ENDLESS = """
import signal
handler = signal.getsignal(signal.SIGINT)
def endless(steps):
    return load_config({
        "run_dir": str(RUNS / "endless"),
        "model": {"path": model, "tokenizer": tokenizer},
        "data": {"train": rows, "max_length": 64},
        "batch_size": 2,
        "steps": steps,
        "checkpoint": {"keep_last": 1},
        "backend": backend,
    })
stopped = Run(endless(2_000), on_step=LivePlot("loss")).train()
"""
FURTHER = """
again = Run(endless(stopped.step + 2), allow_change=["steps"]).train()
print(stopped.status, int(stopped.signal), signal.getsignal(signal.SIGINT) is handler)
print(again.status, again.step - stopped.step)
"""


def test_rows_and_a_model_in_memory_train_as_their_files_do_and_a_resume_goes_on_from_them(
    base_config: Config, spurline_chat_file: Path, spurline_tiny_model: Path
) -> None:
    base_config["steps"] = 4
    files = train(base_config, name="files")
    model = AutoModelForCausalLM.from_pretrained(spurline_tiny_model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(spurline_tiny_model)

    def config() -> Config:
        data = base_config["data"] | {"train": read_json_lines(spurline_chat_file)}
        return base_config | {"data": data, "model": {"path": model, "tokenizer": tokenizer}}

    assert train(config(), stop_after=3).status == "stopped"
    run = train(config())
    assert run.without_times == files.without_times
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # The record alone is enough to open the run again, from any folder.
    recorded = load_config(json.loads((run.run_dir / "config.json").read_text()), recorded=True)
    assert Path(recorded.config.data.train[0].place).is_file()
    changed = base_config["data"] | {"train": read_json_lines(spurline_chat_file)[:-1]}
    with pytest.raises(CheckpointError, match="data"):
        train(config() | {"data": changed, "steps": 6})


def test_a_model_that_is_an_object_needs_a_tokenizer_and_must_be_one(
    base_config: Config, spurline_tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(spurline_tiny_model)
    with pytest.raises(ConfigError, match=r"model\.tokenizer is required with a model object"):
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

    async def cell(steps: int) -> Trained:
        # As in a notebook, whose cells are callbacks of a loop.
        result = train(rl_config, steps=steps)
        await asyncio.sleep(0)
        return result

    rl_config["source"]["environment"]["rewards"] = brevity
    assert asyncio.run(cell(1)).status == "finished"
    first = len(seen)
    assert first >= 16
    run = asyncio.run(cell(2))
    assert run.steps == [1, 2]
    assert run.lines[0]["reward/mean"] < 0
    assert len(seen) > first


def test_rl_trains_in_an_environment_of_a_cell(rl_config: Config, spurline_tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spurline_tiny_model)
    asked: list[str] = []

    async def attempt(task: Any, policy: Any) -> Any:
        chat = ChatFront(policy, tokenizer, [task.row["messages"][0]], where=task.location)
        reply = await chat.reply()
        asked.append(task.uid)
        return policy.finish({"brief": -float(len(reply.text))}, info={"messages": list(chat.messages)})

    source = {**rl_config["source"], "environment": attempt, "reward_weights": {}}
    run = train(rl_config, source=source, steps=1)
    assert len(set(asked)) == 4
    assert run.lines[0]["reward/mean"] < 0
    recorded = json.loads((run.run_dir / "config.json").read_text())
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
    run = Run(
        load_config(base_config), on_step=lambda step, metrics: lengths.append(len(metrics_frame(run.directory.path)))
    )
    Path(base_config["run_dir"]).mkdir()
    assert len(metrics_frame(run.directory.path)) == 0
    run.train()
    assert lengths == [1, 2, 3, 4, 5, 6]
    frame = metrics_frame(run.directory.path)
    assert frame.index.name == "step"
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame["loss"].iloc[-1] == run.state.metrics["loss"]
    with pytest.raises(UserError, match="no such run directory"):
        metrics_frame(Path(base_config["run_dir"]) / "nothing")
    with (Path(base_config["run_dir"]) / "metrics.jsonl").open("a") as stream:
        stream.write("[2]\n")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:7"):
        metrics_frame(run.directory.path)
    plain_import = builtins.__import__

    def without_pandas(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return plain_import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(UserError, match="pip install pandas"):
        metrics_frame(run.directory.path)


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


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookClient]:
    """The notebook after its last cell, with its kernel; its runs are beside its folder."""
    folder = tmp_path_factory.mktemp("notebook") / "examples"
    (folder / "data").mkdir(parents=True)
    for name in ("make_tiny_model.py", "data/sort_train.jsonl"):
        shutil.copy(EXAMPLES / name, folder / name)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('"steps": 80,', '"steps": 30,').replace('"steps": 8,', '"steps": 4,')
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    with pytest.MonkeyPatch.context() as patch:
        # A kernel imports the same packages as the tests, wherever these are, and leaves the user's settings alone.
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("IPYTHONDIR", str(folder.parent / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder.parent / "runtime"))
        with client.setup_kernel():
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number)
            yield client


def runs_of(client: NotebookClient) -> Path:
    return Path(client.resources["metadata"]["path"]).parent / "runs"


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def html_of(notebook: Any) -> list[str]:
    return [output["data"]["text/html"] for output in outputs_of(notebook) if "text/html" in output.get("data", {})]


def execute(client: NotebookClient, source: str) -> str:
    """Return the output of one more cell, which does not become part of the notebook."""
    client.nb.cells.append(nbformat.v4.new_code_cell(source))
    cell = client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
    client.nb.cells.pop()
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert outputs_of(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.processes
def test_the_notebook_trains_plots_and_exports_a_model_that_loads(executed: NotebookClient) -> None:
    runs = runs_of(executed)
    plots = [html for html in html_of(executed.nb) if "<svg" in html]
    assert len(plots) == 2, "each run has one picture, replaced in place"
    assert all(html.count("<polyline") >= 2 for html in plots)
    assert any("<table" in html and "grad_norm" in html for html in html_of(executed.nb)), "the DataFrame"
    sft, rl = read_metrics(runs / "notebook_sft"), read_metrics(runs / "notebook_rl")
    assert sft[-1]["eval/loss"] < sft[19]["eval/loss"]
    # So few steps of a reward do not rise on every machine.
    assert next(line["step"] for line in rl if "eval/reward" in line) == 0, "the first was measured before training"
    [seen] = [cell.outputs[-1]["data"]["text/plain"] for cell in executed.nb.cells if "len(seen)" in cell.source]
    status, calls = ast.literal_eval(seen)
    assert status == "finished"
    assert calls >= (len(rl) - 1) * 24 * 8, "the reward was called in the kernel"
    model = AutoModelForCausalLM.from_pretrained(runs / "notebook_rl" / "model")
    assert len(AutoTokenizer.from_pretrained(runs / "notebook_rl" / "model")) == model.config.vocab_size


@pytest.mark.processes
def test_an_interrupted_kernel_saves_and_stops_and_goes_on_with_the_next_cell(executed: NotebookClient) -> None:
    run_dir = runs_of(executed) / "endless"

    def interrupt() -> None:
        wait_for(lambda: len(read_json_lines(run_dir / METRICS_FILE)) >= 3, "three steps", timeout_s=60)
        os.kill(executed.km.provisioner.process.pid, signal.SIGINT)

    pressing = threading.Thread(target=interrupt, daemon=True)
    pressing.start()
    execute(executed, ENDLESS)
    pressing.join()
    assert execute(executed, FURTHER).splitlines()[-2:] == ["stopped 2 True", "finished 2"]
