"""Pack arrays into JSON messages between a child process and its parent.

Bytes in base64 take a third of the room of numbers in JSON, and need no loop over them.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline_async_rl.engines.progress import Progress

_IDS, _PROMPT, _LOGPROBS, _EXPERTS = "<i4", "<i8", "<f4", "<i2"


def pack_prompt(prompt: Any) -> str:
    return _pack(np.asarray(prompt), _PROMPT)


def unpack_prompt(packed: str) -> list[int]:
    return _unpack(packed, _PROMPT).tolist()


def pack_progress(chunk: Progress) -> dict[str, Any]:
    """Return the next tokens of a response as JSON can hold them."""
    raw, experts = chunk.raw_logprobs, chunk.experts.since(0)
    packed: dict[str, Any] = {
        "token_ids": _pack(chunk.token_ids, _IDS),
        "logprobs": _pack(chunk.logprobs, _LOGPROBS),
        "versions": chunk.version_runs,
    }
    if raw is not None:
        packed["raw_logprobs"] = _pack(raw, _LOGPROBS)
    if experts is not None:
        packed["experts"] = {"shape": list(experts.shape), "int16": _pack(experts, _EXPERTS)}
    return packed


def add_progress(progress: Progress, plain: Mapping[str, Any]) -> None:
    """Add the tokens that `pack_progress` wrote."""
    token_ids = _unpack(plain["token_ids"], _IDS)
    logprobs = _unpack(plain["logprobs"], _LOGPROBS)
    raw = _unpack(plain["raw_logprobs"], _LOGPROBS) if "raw_logprobs" in plain else None
    start = 0
    for version, count in plain["versions"]:
        run = slice(start, start + count)
        progress.add(token_ids[run], logprobs[run], None if raw is None else raw[run], version)
        start += count
    if "experts" in plain:
        experts = _unpack(plain["experts"]["int16"], _EXPERTS).astype(np.int16)
        progress.experts.add(len(progress.experts), experts.reshape(plain["experts"]["shape"]))


def _pack(array: NDArray[Any], dtype: str) -> str:
    return b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode("ascii")


def _unpack(packed: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(b64decode(packed), dtype)
