"""Write the hashes of each step to RUN_DIR/lineage.jsonl.

A line has `step`, the hashes of PARTS, `files` with hashes of the rollouts' files that the step has kept, and
`chain`, the hash of the line and of all lines before it. Two runs with the same value of `chain` had the same history.
A resumed run drops the lines after its checkpoint. A fork begins with the chain of its checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from spurline.files import own_file, sync_file, write_errors
from spurline.plugins import hookimpl
from spurline.plugins.run_view import RunView
from spurline.trackers.jsonl import cut_back, read_json_lines
from spurline_lineage.configs import LineageConfig
from spurline_lineage.fingerprints import (
    PARTS,
    chain_hash,
    content_hash,
    critic_hash,
    policy_hash,
    prompts_hash,
    rollouts_hash,
    rows_hash,
)

LINEAGE_FILE = "lineage.jsonl"
"""Name of the file inside the run directory."""


class Recorder:
    """Hooks that record the lineage of one run. Its constructor attaches it to the run."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._path = run.directory.path / LINEAGE_FILE
        cut_back(self._path, run.state.step)
        self._every = run.config.section(LineageConfig).weights_every_steps
        self._has_critic = run.config.trained_critic is not None
        self._of_groups: dict[str, str] = {}
        self._chain = ""
        # The line of a step whose evaluation has failed is in the checkpoint, and is written after a resume.
        self._line: dict[str, Any] = {}
        run.keep_state("chain", self)
        # Hash the weights that were loaded. They may differ from those that the last line names.
        self._weights = policy_hash(run.backend) if self._is_due(run.state.step) else None
        run.loaded.host.attach(self, "lineage/recorder")

    def state_dict(self) -> dict[str, object]:
        sync_file(self._path)
        return {"chain": self._chain, "line": self._line}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._chain, self._line = state["chain"], state["line"]

    @hookimpl(optionalhook=True)
    def on_rollouts_scored(self, groups: tuple[Any, ...]) -> None:
        self._of_groups = {"rows": prompts_hash(groups), "rollouts": rollouts_hash(groups)}

    @hookimpl(wrapper=True)
    def train_step(self, step: int, batch: Any) -> Generator[None, Mapping[str, float], Mapping[str, float]]:
        started = time.perf_counter()
        # The rows of rollouts are the prompts, since the batch holds what the model has made of them.
        hashes = self._of_groups or {"rows": rows_hash(batch)}
        seconds = time.perf_counter() - started
        metrics = yield
        started = time.perf_counter()
        before, self._weights = self._weights, policy_hash(self._run.backend) if self._is_due(step) else None
        critic = critic_hash(self._run.backend) if self._has_critic and self._is_due(step) else None
        self._of_groups = {}
        after = {"weights_after": self._weights, "critic_after": critic}
        self._line = {"step": step, "weights_before": before, **hashes, **after}
        return {**metrics, "time/lineage": seconds + time.perf_counter() - started}

    @hookimpl
    def on_step_end(self, step: int) -> None:
        if self._line.get("step") != step:
            # The checkpoint of a run without this plugin had an evaluation to repeat.
            return
        line, self._line = self._line, {}
        self._chain = chain_hash(self._chain, line)
        ordered = {name: line[name] for name in ("step", *PARTS) if line.get(name) is not None}
        text = json.dumps({**ordered, "files": self._files(step), "chain": self._chain}) + "\n"
        with write_errors(self._path), open(self._path, "ab", opener=own_file) as file:
            file.write(text.encode())

    def _is_due(self, step: int) -> bool:
        """Return whether weights are hashed after this step."""
        return step % self._every == 0

    def _files(self, step: int) -> dict[str, str]:
        """Return the hashes of the files and folders that the source has written for this step alone, by path."""
        # The file of a step may still be written on another thread.
        self._run.source.flush()
        folder = self._run.directory.path
        found = (path for name in self._run.source.records for path in (folder / name).glob(f"step-{step:06d}.*"))
        return {str(path.relative_to(folder)): content_hash(path) for path in found}


def read_lineage(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a run by step, or {} if it has none. Raises RunDirectoryError if the file is damaged."""
    return {line["step"]: line for line in read_json_lines(run_dir / LINEAGE_FILE)}
