"""What is written down about a config holds no secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spurline import load_config
from spurline.config.compare import differences
from spurline.config.hidden import HIDDEN, hide_secrets
from spurline.config.loading import LoadedConfig

SECRET = "hf_very_secret"


def loaded(value: str) -> LoadedConfig:
    variables = {"HF_TOKEN": value, "NCCL_SOCKET_IFNAME": "eth0"}
    settings: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}
    return load_config({**settings, "cluster": {"runtime_env": {"env_vars": variables}}}, recorded=True)


def test_the_written_config_hides_secrets_that_the_run_itself_has() -> None:
    run = loaded(SECRET)
    assert SECRET not in json.dumps(run.resolved())
    assert run.resolved()["cluster"]["runtime_env"]["env_vars"] == {"HF_TOKEN": HIDDEN, "NCCL_SOCKET_IFNAME": "eth0"}
    assert run.config.cluster.runtime_env.env_vars["HF_TOKEN"] == SECRET


@pytest.mark.parametrize("written", [SECRET, HIDDEN])
def test_another_secret_is_no_difference_for_a_resume_and_is_not_shown(written: str) -> None:
    before = loaded(written).config.model_dump(mode="json")
    assert differences(before, loaded("another").config) == []


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
