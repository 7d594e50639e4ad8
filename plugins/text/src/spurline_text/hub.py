"""Find models, tokenizers and data by name: a local folder, or the Hugging Face hub and its cache.

The libraries try a hub that cannot be reached again and again, for every file they look for. Here it is asked once,
within seconds; when it does not answer they look into the cache alone, which takes no time.
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

_ANSWER_WITHIN_S = 5.0
_ANSWER_COUNTS_S = 60.0
_FOLDERS_SHOWN = 12


@contextmanager
def finding(key: str, source: str) -> Iterator[None]:
    """Load `source`, which the setting `key` names, without waiting for a hub that does not answer.

    Raises ModelError at once for what can only be a local path, and does not exist.
    """
    if Path(source).is_dir():
        yield
        return
    if is_path(source):
        raise ModelError(f"{key}: {describe_missing_path(source)}")
    with asked_once():
        yield


def refuse_adapter(key: str, source: str) -> None:
    """Raise ModelError for a folder with an adapter in the place of a model, naming the model that it is for."""
    folder = Path(source)
    if (folder / "config.json").exists() or not (folder / "adapter_config.json").is_file():
        return
    try:
        settings: Any = json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, ValueError):
        settings = None
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    raise ModelError(
        f"{key}: {source} is an adapter, not a model: it has an adapter_config.json and no config.json. Its base model "
        f"is {base or 'not said there'}. Merge it into that first, with PEFT's `merge_and_unload` and "
        "`save_pretrained`; of a run of Spurline, `spurline export RUN_DIR OUT` writes the merged model."
    )


# What it changes belongs to the whole process.
_asking = threading.RLock()


@contextmanager
def asked_once() -> Iterator[None]:
    """Inside, the hub's client looks into its cache alone, unless the hub answers now. One thread at a time."""
    with _asking:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = before or not hub_answers()
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


_last_answer: tuple[float, bool] | None = None
"""When the hub was last asked, by the monotonic clock, and whether it answered."""


def hub_answers() -> bool:
    """Return whether the hub can be reached. An answer, or its absence, counts for a minute."""
    global _last_answer
    if constants.is_offline_mode():
        return False
    if _last_answer is None or time.monotonic() - _last_answer[0] > _ANSWER_COUNTS_S:
        # Timed from the end: a minute of waiting must not use the answer up.
        answered = _ask()
        _last_answer = time.monotonic(), answered
    return _last_answer[1]


def _ask() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_WITHIN_S)
    except Exception:  # noqa: BLE001 - whatever a client raises, there was no answer
        return False
    return True


def is_path(source: str) -> bool:
    """Return whether it cannot be a hub name, which has at most one slash and does not begin like a path."""
    return source.startswith(("/", ".", "~", "$")) or source.count("/") > 1 or Path(source).exists()


def may_be_path(source: str) -> bool:
    """Return whether a name that was not found on the hub may be a misspelled path, as of `models/tiny`."""
    parent = Path(source).parent
    return "/" in source and parent.is_dir() and suggestion(Path(source).name, _folders(parent)) != ""


def describe_missing_path(source: str) -> str:
    """Say what is wrong with a local path, with the nearest name there is."""
    path = Path(source)
    if path.is_file():
        return f"{source} is a file. Give the folder with `config.json`, weights and tokenizer."
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    folders = _folders(parent)
    # The first part of the path that is not there is the one that may be misspelled.
    wrong = path.parts[len(parent.parts)] if parent != Path() else path.parts[0]
    shown = ", ".join(folders[:_FOLDERS_SHOWN]) + (", ..." if len(folders) > _FOLDERS_SHOWN else "")
    return (
        f"folder {source} does not exist.{suggestion(wrong, folders)} Folders in {parent.absolute()}: "
        f"{shown or '(none)'}."
    )


def describe_unfound(source: str, what: str, reason: str) -> str:
    """Say what was looked for where, for a name that is not a path. reason: the words of the hub's client."""
    searched = f"{source} is neither a local folder nor a {what}"
    near = suggestion(source, _folders(Path.cwd())) if "/" not in source else ""
    cached = suggestion(source, _cached_names())
    if hub_answers():
        return (
            f"{searched} the Hugging Face hub gave us: {reason}\nCheck the spelling and model.revision; for a private "
            f"model run `hf auth login`.{near or cached}"
        )
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
    return (
        f"{searched} in the cache of the Hugging Face hub ({constants.HF_HUB_CACHE}), and {why}.{near or cached}\n"
        f"Where there is network run `hf download {source}` and copy that cache; without network give a local folder."
    )


def _folders(parent: Path) -> list[str]:
    return sorted(entry.name for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _cached_names() -> list[str]:
    """Models in the hub's cache."""
    cache = Path(constants.HF_HUB_CACHE)
    found = cache.glob("models--*") if cache.is_dir() else ()
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in found]
