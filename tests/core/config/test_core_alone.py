"""With no plugin installed, what a config asks for is told with the package that has it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spurline import load_config
from spurline.errors import ConfigError

INSTALL = re.compile(r"`pip install \S*?([a-z]\w*)(?: [^`]*)?`")


def told(**settings: Any) -> dict[str, str]:
    """What is said of each setting, with installing as the name of the plugin."""
    with pytest.raises(ConfigError) as raised:
        load_config({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1, **settings})
    lines = [line.removeprefix("config: ").partition(" ") for line in str(raised.value).splitlines()]
    return {key: INSTALL.sub(lambda found: f"INSTALL {found[1]}", said) for key, _, said in lines}


def test_a_usual_config_is_told_what_to_install_for_each_component() -> None:
    assert told(loss="ppo") == {
        "data.train.0": "is given, but no enabled plugin has a dataset. The plugin 'text' has some: install it with "
        "INSTALL text.",
        "loss": "is 'ppo', which the plugin 'rl' has: install it with INSTALL rl.",
        **{
            kind: f"is required, and no enabled plugin has {article} {kind}. The plugin '{plugin}' has some: install "
            f"it with INSTALL {plugin}."
            for kind, article, plugin in (
                ("source", "a", "text"),
                ("tokenization", "a", "text"),
                ("optimizer", "an", "models"),
                ("schedule", "a", "models"),
                ("backend", "a", "models"),
            )
        },
    }


@pytest.mark.parametrize(
    ("settings", "key", "name", "plugin"),
    [
        ({"source": "sft"}, "source", "sft", "text"),
        ({"source": {"name": "rollouts"}}, "source", "rollouts", "rl"),
        ({"source": {"name": "preference"}}, "source", "preference", "preference"),
        ({"trackers": ["wandb"]}, "trackers.0", "wandb", "trackers"),
        ({"data": {"train": "a", "order": "reward_adaptive"}}, "data.order", "reward_adaptive", "rl"),
        ({"evaluations": {"more": {"name": "answers", "data": "a"}}}, "evaluations.more", "answers", "rl"),
    ],
)
def test_a_component_of_a_plugin_that_is_missing_names_it(
    settings: dict[str, Any], key: str, name: str, plugin: str
) -> None:
    assert told(**settings)[key].startswith(
        f"is '{name}', which the plugin '{plugin}' has: install it with INSTALL {plugin}."
    )


@pytest.mark.parametrize(
    ("settings", "key", "plugin"),
    [
        ({"critic": {}}, "critic", "rl"),
        ({"evaluation": {"generate": {"rewards": "exact_match"}}}, "evaluation.generate", "rl"),
        ({"report": {}}, "report", "insight"),
        ({"cluster": {}}, "cluster", "ranks"),
    ],
)
def test_a_section_of_a_plugin_that_is_missing_names_it(settings: dict[str, Any], key: str, plugin: str) -> None:
    assert told(**settings)[key].endswith(f"'{plugin}', which is not enabled: install it with INSTALL {plugin}.")
