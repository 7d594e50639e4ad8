"""What parent and child tell each other: one JSON object a line, each about the call that its `id` names.

Place on the way: calls of the pool -> lines -> the child's engine -> lines -> results. No pickles: a child never runs
what it was sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spurline.protocols.rollout_engine import GenerationRequest, Sampling

MAX_LINE_BYTES = 1 << 28
"""Longest line that is read: millions of prompt tokens."""


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    return json.loads(line)


def pack_request(request: GenerationRequest) -> dict[str, Any]:
    return {**asdict(request), "prompt_ids": [int(token) for token in request.prompt_ids]}


def unpack_request(values: Mapping[str, Any]) -> GenerationRequest:
    sampling = values["sampling"]
    lists = {name: tuple(sampling[name]) for name in ("stop_token_ids", "stop")}
    return GenerationRequest(**{**values, "sampling": Sampling(**{**sampling, **lists})})
