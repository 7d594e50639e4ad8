"""Load the tokenizer of a model, and describe why a tokenizer or a model cannot be loaded."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spurline.config.run_config import CHAT_TEMPLATES, ModelConfig
from spurline.errors import ModelError, listing, suggestion
from spurline_text.hub import describe_unfound, finding, refuse_adapter

_TEMPLATES = Path(__file__).parent / "chats" / "templates"

_MARKERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""The tokens that each bundled template writes around turns, except `zephyr`, which uses the end-of-sequence token."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer` or `model.path`, with `model.chat_template` if that is set.

    A tokenizer without a padding token pads with its end-of-sequence token. Raises ModelError if loading fails.
    """
    source = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if not model.tokenizer:
        refuse_adapter(key, source)
    try:
        with finding(key, source):
            tokenizer = AutoTokenizer.from_pretrained(
                source,
                # The revision is a commit of the model's repository, so another repository does not have it.
                revision=None if model.tokenizer else model.revision,
                trust_remote_code=model.trust_remote_code,
            )
    # The last three exceptions come from JSON that is nested too deeply or has values of the wrong type.
    except (OSError, ValueError, KeyError, ImportError, RecursionError, TypeError, AttributeError) as error:
        raise ModelError(describe_missing(key, source, "tokenizer", error, model.trust_remote_code)) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # Without tokenizer files, transformers makes an empty tokenizer of the model's type.
        raise ModelError(describe_missing(key, source, "tokenizer", OSError("there are no tokenizer files")))
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template)
        # Error messages show this attribute as the template's name.
        tokenizer.chat_template_source = model.chat_template
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"{key}: the tokenizer of {source} has neither a padding nor an end-of-sequence token. "
                "Set `eos_token` in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of the chat template of the tokenizer, for messages."""
    return getattr(tokenizer, "chat_template_source", None) or f"of the tokenizer {tokenizer.name_or_path}".rstrip()


def template_notes(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a warning if the tokenizer lacks tokens that the bundled chat template of `model` writes."""
    broken = _split_markers(model.chat_template or "", tokenizer)
    if not broken:
        return []
    fitting = [name for name in CHAT_TEMPLATES if not _split_markers(name, tokenizer)]
    return [
        f"model.chat_template: {model.chat_template} writes {listing(broken)}, which the tokenizer "
        f"{tokenizer.name_or_path} cuts into several tokens, so that no single token ends an answer. Remove the "
        f"setting to use the tokenizer's own template. Bundled templates that fit it: {listing(fitting)}."
    ]


def _split_markers(template: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the markers of a bundled template that the tokenizer cuts into several tokens."""
    markers = _MARKERS.get(template, ())
    return [marker for marker in markers if len(tokenizer.encode(marker, add_special_tokens=False)) != 1]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding id. It may be the end-of-sequence token, because padding never reaches the model."""
    token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    assert isinstance(token_id, int), f"load_tokenizer gives every tokenizer a padding token, got {token_id!r}"
    return token_id


def _read_template(template: str) -> str:
    if template in CHAT_TEMPLATES:
        return (_TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8").rstrip("\n")
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template: {template} cannot be read ({error}).{suggestion(template, CHAT_TEMPLATES)} Give the "
            f"path of a Jinja file, UTF-8, or a name: {listing(CHAT_TEMPLATES)}."
        ) from error


def describe_missing(key: str, source: str, what: str, error: Exception, trust_remote_code: bool = False) -> str:
    """Describe why no `what` (model, weights, tokenizer) can be loaded from `source`, the value of setting `key`."""
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
    return f"{key}: {describe_unfound(source, what, reason)}"
