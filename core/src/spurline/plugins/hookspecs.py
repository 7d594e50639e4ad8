"""The hooks of core: the points of a run at which every plugin is called.

A plugin defines further hooks with `registry.add_hookspecs`. All hooks run on the loop's thread of the controller
process, in the order of the config's `plugins` list. A task that exactly one plugin does is a component, not a hook.
A hookimpl is a plugin's implementation of a hook. It takes any subset of the hook's arguments, without default values.
If it raises an error, the text names the plugin and the hook. An error that is not a `SpurlineError` becomes the cause
of a `HookFailedError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from spurline.data.batch import TrainingBatch
    from spurline.plugins.registry import ComponentRegistrar
    from spurline.plugins.run_view import RunView
    from spurline.protocols.backend import Role


PROJECT = "spurline"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_components(registry: ComponentRegistrar) -> None:
    """Offer components by kind and name.

    When: while the config is loaded, before anything is validated, in every process of a run.
    registry: call `registry.add(ConfigClass, "module:Class")`. The config class gives the kind and the name. With
        `registry.add_kind` and `registry.add_hookspecs`, a plugin defines further kinds and hooks.
    Errors: an unknown kind or a taken name stops loading. The error names the distributions. Import no torch here.
    """


@hookspec
def on_run_start(run: RunView) -> None:
    """Called once before the first step, after a checkpoint (if any) was loaded.

    run: the run with all components built; `run.state.step` is the last finished step (0 in a new run). Call
        `run.keep_state` here. In a resumed run, it restores the state at once.
    Errors: any exception ends the run before it trains.
    """


@hookspec
def on_step_start(step: int) -> None:
    """Called before a step gets its batch.

    step: 1-based number of the step about to run.
    Errors: any exception ends the run. The last checkpoint stays valid.
    """


@hookspec(firstresult=True)
def train_step(step: int, batch: TrainingBatch) -> Mapping[str, float] | None:  # type: ignore[empty-body]
    """Update the model with one batch. Core alone implements this. Plugins may only wrap it (`wrapper=True`).

    step: 1-based. batch: read-only, valid until the step ends.
    Returns the step's metrics: `loss` in nats per loss token, `grad_norm`, `lr`, `tokens`, ... A wrapper returns all of
        these unchanged, and may add finite numbers under new names.
    Errors: any exception ends the run, and so does a wrapper with any other result. No checkpoint is then written.
    """


@hookspec
def on_optimizer_step(update: int, role: Role) -> None:
    """Called within `train_step` after each optimizer step, when the backend has the new weights.

    update: 1-based number of the optimizer step in the whole run, across resumes. Each role has its own numbers.
    role: the model that was trained, `policy` or `critic`.
    Errors: any exception ends the run, and no checkpoint is written.
    """


@hookspec
def on_step_end(step: int, metrics: Mapping[str, float]) -> None:
    """Called at the end of a step, after update, weight publishing, evaluation and recording, and before a checkpoint.

    step: 1-based number of the finished step.
    metrics: metrics of the step as they are recorded, such as `loss` in nats per token. `time/step`, in seconds,
        includes the evaluation (`time/evaluate`). Read-only. If the evaluation of a step failed and is repeated
        after a resume, the loop's `time/...` metrics are missing.
    Errors: any exception ends the run. The last checkpoint stays valid.
    """


@hookspec
def on_eval_end(step: int, metrics: Mapping[str, float]) -> None:
    """Called after a held-out evaluation.

    step: the step after which the evaluation ran. metrics: keys start with `eval/`. Read-only.
    Errors: any exception ends the run. The last checkpoint stays valid.
    """


@hookspec
def on_checkpoint_saved(step: int, path: Path) -> None:
    """Called when a checkpoint is complete, durable and marked as the latest.

    With `checkpoint.async`, this is called after the `on_step_end` of a later step, or at the end of the run.
    step: the last step that the checkpoint includes. path: its folder.
    Errors: any exception ends the run. This checkpoint stays valid.
    """


@hookspec
def on_run_end(run: RunView, error: BaseException | None) -> None:
    """Called once when the run ends, also after a failure, while all components are still open.

    run: as given to `on_run_start`; `run.state.step` is the last finished step.
    error: the error that ended the run, or None after the last step or a graceful stop.
    Errors: if the run failed, an exception here becomes a note of the run's error. Otherwise it is raised.
    """


@hookspec
def on_run_recorded(run: RunView) -> Mapping[str, Path]:  # type: ignore[empty-body]
    """Called after a run that did not fail, when its record is complete, including its status in summary.json.

    run: the run, which has ended.
    Returns the files that the hook made from the record, by the names that the terminal shows, such as `report`.
    Errors: any exception is raised to the caller of `train`. What was trained and saved stays valid.
    """
