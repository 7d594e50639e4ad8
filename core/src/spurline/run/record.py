"""What a run leaves behind for people besides metrics and checkpoints: config, summary, sample answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spurline.config.loading import LoadedConfig
from spurline.data.token_store import describe
from spurline.files import write_json
from spurline.run.build import Components
from spurline.run.directory import RunDirectory
from spurline.trackers.jsonl import cut_back


def summarize_run(components: Components, loaded: LoadedConfig) -> dict[str, Any]:
    """Facts about data, model and versions, for summary.json."""
    data: dict[str, Any] = {"train": dict(components.data.source.summary())}
    if components.data.evaluation is not None:
        data["eval"] = dict(components.data.evaluation.summary())
    return {
        "data": data,
        **components.backend.facts(),
        "versions": loaded.host.versions(),
        "total_steps": components.data.source.total_steps,
    }


class RunRecordFiles:
    """Writes config.json, summary.json and eval_samples.jsonl of a run directory.

    summary: JSON-able facts; `status` and `error` are added here.
    """

    def __init__(self, directory: RunDirectory, summary: Mapping[str, Any]) -> None:
        self._directory = directory
        self.summary: dict[str, Any] = dict(summary)

    def start(self, config: Mapping[str, Any], resume_step: int) -> None:
        """Write the resolved config, mark the run as running, and drop samples of steps that are trained again."""
        write_json(self._directory.config, config)
        self._write_status("running")
        if self._directory.eval_samples.exists():
            cut_back(self._directory.eval_samples, resume_step)

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the generated answers of one evaluation."""
        if samples:
            text = "".join(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples)
            with self._directory.eval_samples.open("a", encoding="utf-8") as file:
                file.write(text)

    def data_notes(self) -> list[str]:
        """What there is to train and evaluate on, and what was left out and why, as lines."""
        return [line for name, facts in self.summary["data"].items() for line in describe(name, facts)]

    def finish(self, status: str, error: str | None = None, given_up: Sequence[str] = ()) -> None:
        """Mark the run as finished, stopped or failed. given_up: a line for each prompt that was left out."""
        if given_up:
            self.summary["given_up"] = list(given_up)
        self._write_status(status, error)

    def _write_status(self, status: str, error: str | None = None) -> None:
        self.summary = {**self.summary, "status": status}
        if error is not None:
            self.summary["error"] = error
        write_json(self._directory.summary, self.summary)
