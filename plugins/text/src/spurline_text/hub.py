"""Find models, tokenizers and data by name: a local folder, or the Hugging Face hub and its cache.

The libraries of Hugging Face try to reach the hub again for every file. This module checks at most once a minute
whether the hub answers. If there is no answer within 5 seconds, the libraries use only the cache.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session

from spurline.errors import ModelError, suggestion
from spurline_text.datasets.local_files import neighbours

_ANSWER_WITHIN_S = 5.0
_ANSWER_COUNTS_S = 60.0


@contextmanager
def finding(key: str, source: str) -> Iterator[None]:
    """Let the caller load `source`, the value of the setting `key`, without waiting for a hub that does not answer.

    Raises ModelError for a local path that does not exist.
    """
    if Path(source).is_dir():
        yield
        return
    if Path(source).is_file():
        raise ModelError(f"{key}: {source} is a file. Give the folder with `config.json`, weights and tokenizer.")
    # A hub name has at most one slash, and does not begin like a path.
    if source.startswith(("/", ".", "~", "$")) or source.count("/") > 1 or Path(source).exists():
        raise ModelError(f"{key}: folder {source} does not exist.{neighbours(Path(source))}")
    with asked_once():
        yield


def refuse_adapter(key: str, source: str) -> None:
    """Raise ModelError if the folder contains an adapter. The error names the base model."""
    folder = Path(source)
    if not (folder / "adapter_config.json").is_file():
        return
    try:
        settings: Any = json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, ValueError):
        settings = None
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    raise ModelError(
        f"{key}: {source} is an adapter, not a model: it has an adapter_config.json. Its base model is "
        f"{base or 'not known'}. Merge the adapter into its base model with PEFT's `merge_and_unload` and "
        "`save_pretrained`; for a run of Spurline, `spurline export RUN_DIR OUT` writes the merged model. If the "
        "folder has the weights of a whole model, remove the file."
    )


# Only one thread may be in `asked_once`, because it changes a setting of the whole process.
_asking = threading.RLock()


@contextmanager
def asked_once() -> Iterator[None]:
    """Let the hub's client use only the cache if the hub does not answer. Other threads wait until this block ends."""
    with _asking:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = before or not hub_answers()
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


_last_answer: tuple[float, bool] | None = None
"""Time of the last check of the hub (monotonic clock), and whether the hub answered."""


def hub_answers() -> bool:
    """Return whether the hub can be reached. The result is kept for a minute."""
    global _last_answer
    if constants.is_offline_mode():
        return False
    if _last_answer is None or time.monotonic() - _last_answer[0] > _ANSWER_COUNTS_S:
        answered = _ask()
        # The minute begins after the wait for an answer.
        _last_answer = time.monotonic(), answered
    return _last_answer[1]


def _ask() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_WITHIN_S)
    except Exception:  # noqa: BLE001 - a client may raise anything if there is no answer
        return False
    return True


def describe_unfound(source: str, what: str, reason: str) -> str:
    """Describe where the name `source` was searched without success. `reason` is the error of the hub's client."""
    searched = f"{source} is neither a local folder nor a {what}"
    if hub_answers():
        return (
            f"{searched} on the Hugging Face hub: {reason}\nCheck the spelling and model.revision; for a private "
            "model run `hf auth login`."
        )
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
    cached = [folder.name.removeprefix("models--") for folder in Path(constants.HF_HUB_CACHE).glob("models--*")]
    near = suggestion(source, [name.replace("--", "/") for name in cached])
    return (
        f"{searched} in the cache of the Hugging Face hub ({constants.HF_HUB_CACHE}), and {why}.{near}\n"
        f"Run `hf download {source}` on a machine with network and copy its cache, or give a local folder."
    )
