"""Make the key that identifies tokens. Runs with equal keys make the same tokens, so they share an entry.

The key depends on content and not on names: renaming or touching a file does not change it, but one changed row,
template or library version does. Making the key reads data only for the fingerprints of the datasets.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from spurline.config.run_config import DataConfig
from spurline.config.section import OnResume
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.cache.entry import FORMAT_VERSION, CacheKey
from spurline_text.encoding import require_offsets
from spurline_text.tokenization import store_labels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKEN_CODE = ("spurline_text", "spurline.data.token_store", "spurline_collation_fast.tokenization")
"""Packages and modules whose code decides the content of an entry."""

LIBRARIES = ("datasets", "jinja2", "pyarrow", "tokenizers", "transformers")
"""Libraries that read, render and encode rows. The key contains their versions."""

_CLOCK = re.compile(r"\b(strftime_now|datetime)\b")
"""Names that a chat template uses to print the date, as Llama 3.2 does in the system prompt."""

_UNUSED_OF_DATASET = {"weight", "share", "label"}
"""Settings that act only after tokenization, so the key does not contain them. The key contains no paths either."""

_UNUSED_OF_DATA = {"train", "eval", "order"}
"""Settings that act only after tokenization, or that the key already contains for each dataset."""


def cache_key(
    datasets: Sequence[DatasetToTokenize],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    today: date | None = None,
) -> CacheKey:
    """Return the key of the tokens of these datasets. Raises ModelError if the tokenizer cannot give loss masks.

    `today` matters only if the chat template prints the date. If it is None, the current date is used.
    """
    require_offsets(tokenizer)
    parts = {
        "datasets": [_dataset_part(source) for source in datasets],
        "tokenizer": _tokenizer_part(tokenizer),
        "date": (today or date.today()).isoformat() if prints_date(tokenizer) else None,
        "data": data.model_dump(mode="json", exclude=_UNUSED_OF_DATA),
        "code": {
            "modules": code_version(_TOKEN_CODE),
            **{library: importlib.metadata.version(library) for library in LIBRARIES},
        },
        "format": FORMAT_VERSION,
    }
    return CacheKey(_hash(parts), parts, tuple(store_labels(datasets)))


def prints_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template prints the date. If so, the tokens are valid for one day only."""
    templates = tokenizer.chat_template or ""
    texts = templates.values() if isinstance(templates, dict) else (templates,)
    return any(_CLOCK.search(text) for text in texts)


def code_version(names: Iterable[str]) -> str:
    """Hash the source of modules, and of all modules in packages, without importing them."""
    digest = xxhash.xxh3_128()
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"no module {name}"
        assert spec.origin is not None, f"no source of {name}"
        is_package = spec.submodule_search_locations is not None
        files = sorted(Path(spec.origin).parent.rglob("*.py")) if is_package else [Path(spec.origin)]
        for file in files:
            digest.update(f"{name}\0{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _dataset_part(source: DatasetToTokenize) -> dict[str, Any]:
    fields = type(source.config).model_fields
    free = {name for name, field in fields.items() if OnResume.FREE in field.metadata}
    return {
        "fingerprint": source.dataset.fingerprint(),
        **source.config.model_dump(mode="json", exclude=free | _UNUSED_OF_DATASET),
    }


def _tokenizer_part(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    # Each call of the tokenizer sets these two values, so they say nothing about the tokenizer itself.
    del backend["truncation"], backend["padding"]
    kind = type(tokenizer)
    source = inspect.getsourcefile(kind)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "class_source": xxhash.xxh3_128_hexdigest(Path(source).read_bytes()) if source else None,
        "backend": _hash(backend),
        "chat_template": _hash(tokenizer.chat_template) if tokenizer.chat_template else None,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
    }


def _hash(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
