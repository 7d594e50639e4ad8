"""How many files one sample or prompt goes through, and that `docs/tour.md` lists them all."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spurline import Run, load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")

SET_UP = re.compile(
    r"""(spurline/(config|plugins|protocols)/.*
    | spurline/run/(?!loop).*
    | spurline/(errors|importing|files|progress|digests|tensor_files|terminal)\.py
    | spurline/backends/local/checkpoint\.py
    | spurline/model/(architecture|device_profile|freezing|loading|memory|probe|generation|computing|kernels)\.py
    | spurline/in_memory/functions\.py
    | spurline/model/(other_forwards|saved_state|saved_weights|trainable|weight_files|weights)\.py
    | spurline/model/(holding/(host_copies|narrow_weights|quantized_weights)|experts/routers|streams/positions)\.py
    | spurline/ranks/(devices|launch)\.py
    | spurline/trackers/(console|readout)\.py
    | spurline/optimizers/(groups|state|adamw|sgd|muon)\.py
    | spurline/rl/(health_words|held_out|functions|prompt_survey|rewards/references|kept_rollouts/reader)\.py
    | spurline/data/(tokenizer|hub|datasets/file_digest)\.py
    | spurline/rl/engines/in_process/(own_cache|weight_writer)\.py
    | .*configs\.py
    | spurline_async_rl/source/colocation\.py
    | spurline_async_rl/engines/vllm/(launch|adapters)\.py)$""",
    re.VERBOSE,
)
"""Config, plugins, building, optimizers made and saved, loading of data's and models' files, checkpoints, terminal; and
classes that such a run only imports."""

READING = re.compile(
    r"""spurline/data/(
      datasets/(hf_dataset|local_files|json_rows|arrow_rows)
    | rows/(rows|formats|messages)
    | chats/(chat|chat_template|metered_jinja|template_budget)
    | encoding|tokenization|token_bytes|token_pieces|token_store)\.py$""",
    re.VERBOSE,
)
"""From a file to rows and tokens, which is the first walk's; the others begin with a prompt."""


def files_that_run(config: dict[str, Any]) -> set[str]:
    """Source files, from the import name on, in which a function is called while this run trains."""
    run = Run(load_config(config))
    found = set[str]()

    def profile(frame: Any, event: str, argument: object) -> None:
        # Bodies of modules and classes run when something is imported.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        run.train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = (path.split("/src/")[1] for path in found if "/src/spurline" in path)
    return {path for path in ours if not SET_UP.match(path)}


def listed(walk: str) -> set[str]:
    text = PAGE.split(f"<!-- walk: {walk} -->")[1].split("<!--")[0]
    return set(re.findall(r"`([\w/]+\.py)`", text))


def asynchronous(config: dict[str, Any]) -> dict[str, Any]:
    source = {"name": "async_rollouts", "max_staleness": 1, "correction": "tis", "weight_sync": "in_process"}
    return config | {"plugins": ["async_rl"], "source": config["source"] | source}


@pytest.mark.parametrize(
    ("walk", "most", "change"),
    [("sft", 42, None), ("rl", 59, dict), ("async", 76, asynchronous)],
    ids=["sft", "rl", "async"],
)
def test_one_sample_goes_through_files_of_the_tour_alone(
    walk: str,
    most: int,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None,
    base_config: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    config = base_config if change is None else change(request.getfixturevalue("rl_config"))
    found = files_that_run(config | {"steps": 2, "report": {"enabled": False}})
    if change is not None:
        found = {path for path in found if not READING.match(path)}
    # What an earlier test of this process has done once, or time decides, may not run: then a listed file is missing.
    assert found - listed(walk) == set()
    assert len(found) > 0.8 * len(listed(walk))
    assert len(listed(walk)) <= most
    folders = [ROOT / "core" / "src", ROOT / "plugins" / "async_rl" / "src"]
    assert [path for path in listed(walk) if not any((folder / path).is_file() for folder in folders)] == []
