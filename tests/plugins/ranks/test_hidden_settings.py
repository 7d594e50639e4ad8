"""What is written down about a cluster's environment holds no secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spurline import load_config
from spurline.config.compare import differences
from spurline.config.hidden import HIDDEN
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
