"""What is not there is found out at once: neither a missing folder nor a hub that does not answer costs time."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import constants

from spurline.config.run_config import ModelConfig
from spurline.errors import DataError, ModelError
from spurline_models.testing.inputs import write_tiny_model
from spurline_text import hub
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def _not_asked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub be asked for the first time, as where nobody has said that there is no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_last_answer", None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache that holds one model's folder."""
    (tmp_path / "hub" / "models--someone--tiny-model").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def failure(path: str) -> str:
    with pytest.raises(ModelError) as raised:
        load_tokenizer(ModelConfig(path=path))
    return str(raised.value)


def test_a_hub_that_refuses_is_asked_once(
    cache: Path, connected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = failure("someone/tiny-modle")
    assert "neither a local folder nor a tokenizer in the cache of the Hugging Face hub" in message
    assert f"({cache}), and http://127.0.0.1:9 cannot be reached. Did you mean 'someone/tiny-model'?" in message
    assert "hf download someone/tiny-modle" in message
    assert connected == [("127.0.0.1", 9)]
    assert not constants.is_offline_mode(), "the libraries are online again"


def test_a_hub_that_is_silent_is_given_up_after_one_time_limit(
    cache: Path, connected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "_ANSWER_WITHIN_S", 0.5)
        message = failure("someone/other")
    assert "cannot be reached" in message
    assert len(connected) == 1


def test_an_answer_counts_for_a_whole_minute_whenever_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [59.9]
    asked: list[float] = []
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(hub, "_ask", lambda: bool(asked.append(now[0])))
    for later in (59.9, 60.1, 119.8, 120.0):
        now[0] = later
        assert not hub.hub_answers()
    assert asked == [59.9, 120.0]


def test_offline_mode_is_named_and_nobody_asked(
    cache: Path, connected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = failure("someone/other")
    assert "HF_HUB_OFFLINE is set" in message
    assert connected == []


def test_data_on_a_hub_that_refuses_is_asked_for_once(
    cache: Path, connected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match="someone/rows: cannot be loaded from the Hugging Face hub"):
        HfDataset(HfDatasetConfig(path="someone/rows"))[0]
    assert connected == [("127.0.0.1", 9)]


@pytest.mark.parametrize("path", ["./models/tinny", "models/old/tinny/v1", "~/no/such/model"])
def test_what_looks_like_a_path_never_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_answers", lambda: pytest.fail("asked the hub"))
    message = failure(path)
    assert f"model.path: folder {Path(path).expanduser() if path[0] == '~' else path} does not exist." in message
    if path.endswith("models/tinny"):
        assert f"Did you mean 'tiny'? {tmp_path / 'models'} contains: tiny." in message


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    message = failure(str(folder / "config.json"))
    assert "config.json is a file. Give the folder" in message
