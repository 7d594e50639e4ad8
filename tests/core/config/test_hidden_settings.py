"""What is written down about a config holds no secrets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from fake_plugins import FakePlugins

from spurline import load_config
from spurline.config.compare import differences
from spurline.config.hidden import HIDDEN, hide_secrets
from spurline.config.loading import LoadedConfig
from spurline.config.section import OnResume, Section

SECRET = "hf_very_secret"


class LaunchSection(Section):
    """What processes are started with."""

    variables: Annotated[dict[str, str], OnResume.FREE] = {}
    """Their environment."""


@pytest.fixture
def load(bare: None, plugins: FakePlugins) -> Callable[[str], LoadedConfig]:
    available = plugins.add("launch", config=LaunchSection)

    def loaded(value: str) -> LoadedConfig:
        variables = {"HF_TOKEN": value, "NCCL_SOCKET_IFNAME": "eth0"}
        settings: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}
        section = {"plugins": ["launch"], "launch": {"variables": variables}}
        return load_config({**settings, **section}, recorded=True, available=available)

    return loaded


def test_the_written_config_hides_secrets_that_the_run_itself_has(load: Callable[[str], LoadedConfig]) -> None:
    run = load(SECRET)
    assert SECRET not in json.dumps(run.resolved())
    assert run.resolved()["launch"]["variables"] == {"HF_TOKEN": HIDDEN, "NCCL_SOCKET_IFNAME": "eth0"}
    assert run.config.section(LaunchSection).variables["HF_TOKEN"] == SECRET


@pytest.mark.parametrize("written", [SECRET, HIDDEN])
def test_another_secret_is_no_difference_for_a_resume_and_is_not_shown(
    load: Callable[[str], LoadedConfig], written: str
) -> None:
    before = load(written).config.model_dump(mode="json")
    assert differences(before, load("another").config) == []


@pytest.mark.parametrize(
    "name",
    [
        "hf_token",
        "api_key",
        "api-key",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "TOKEN",
        "Authorization",
    ],
)
@pytest.mark.parametrize("value", [SECRET, [SECRET, "another"]])
def test_texts_by_the_name_of_a_secret_are_hidden(name: str, value: Any) -> None:
    assert hide_secrets({"engine_args": [{name: value}]}) == {"engine_args": [{name: HIDDEN}]}


@pytest.mark.parametrize("name", ["eos_token", "sort_key", "api_key_env", "tokens", "max_new_tokens"])
def test_settings_that_only_sound_so_are_not(name: str) -> None:
    assert hide_secrets({name: "value"}) == {name: "value"}


def test_the_login_in_an_address_is_hidden() -> None:
    assert hide_secrets(["http://me:word@node1:8000", "http://node1/a@b"]) == [
        f"http://{HIDDEN}@node1:8000",
        "http://node1/a@b",
    ]
