"""Say what has changed in the plugin interface, version by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CHANGED: Mapping[int, Sequence[str]] = {
    2: (
        "The factory of a dataset or a stream is called as `Class(config, registry=registry)`.",
        "`LossConfig.uses_reference` and `SourceFacts.uses_reference` are `roles`, the names of untrained models.",
        "`PromptSource.make_attempts` takes `environment`, which makes the attempts in place of the run's own.",
        "A loss that needs whole distributions implements `ReadsLogits` of `spurline_models.losses.distributions`.",
        "`run.metrics_frame()` is `metrics_frame(run.directory.path)` of `spurline_insight.notebook`.",
        "Core has given names to other packages. A table in docs/architecture.md says what is where.",
    )
}
"""A sentence for each change that a plugin may have to follow, by the version that made it."""


def changes_since(api: int) -> str:
    """Return the changes after a version of the interface, a line for each, or an empty string."""
    lines = [f"- {line}" for version, changes in CHANGED.items() if version > api for line in changes]
    return "\n".join(["", f"Changed since interface {api}:", *lines]) if lines else ""
