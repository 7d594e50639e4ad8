"""`examples/notebook.ipynb` as a person runs it: in a kernel, cell after cell; and what an interrupt does."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from run_helpers import read_metrics, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from spurline.trackers.jsonl import METRICS_FILE, read_json_lines

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


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookClient]:
    """The notebook after its last cell, with its kernel; its runs are beside its folder."""
    folder = tmp_path_factory.mktemp("notebook") / "examples"
    (folder / "data").mkdir(parents=True)
    for name in ("make_tiny_model.py", "data/sort_train.jsonl"):
        shutil.copy(EXAMPLES / name, folder / name)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
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
