"""Say why a Hugging Face model or tokenizer cannot be loaded, and what is nearest to it.

Used by the tokenizer and by every backend's model loading, so that both give the same advice. Loads nothing.
"""

from __future__ import annotations

from pathlib import Path

from spurline.errors import suggestion


def describe_missing(key: str, source: str, what: str, error: Exception, trust_remote_code: bool = False) -> str:
    """Text of a ModelError. key: config path that named `source`. what: `model`, `weights` or `tokenizer`."""
    folder = Path(source)
    text = str(error)
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if folder.is_dir():
        files = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "(empty)"
        return f"{key}: no {what} can be loaded from folder {source}: {reason}\nFiles there: {files}."
    if "trust_remote_code" in text and not trust_remote_code:
        return (
            f"{key}: {source} needs Python code from its repository. Read that code, then set "
            "model.trust_remote_code: true."
        )
    if _looks_like_path(source):
        return f"{key}: folder {source} does not exist.{_nearest_folder(folder)}"
    return (
        f"{key}: {source} is neither a local folder nor a {what} the Hugging Face hub gave us: {reason}\n"
        "Check the spelling and model.revision; for a private model run `hf auth login`; without network give a "
        "local folder."
        f"{_nearest_folder(folder)}"
    )


def _looks_like_path(source: str) -> bool:
    # A hub name has at most one slash and does not start like a path.
    return source.startswith(("/", "./", "../", "~")) or source.count("/") > 1


def _nearest_folder(folder: Path) -> str:
    if not folder.parent.is_dir():
        return ""
    names = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
    return suggestion(folder.name, names)
