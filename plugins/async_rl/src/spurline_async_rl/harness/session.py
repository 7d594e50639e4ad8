"""What an agent gets: where the model is, and what it is asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CANCEL_TIMEOUT_S = 20.0
"""Seconds that a cancelled part of an attempt may take to end; less than the attempt itself has to."""


@dataclass(frozen=True)
class Session:
    """One attempt at one prompt, as its agent sees it.

    base_url, api_key, model: for any OpenAI client. The address is this attempt's own: all that is asked there becomes
    its trajectory, and nothing can be asked there when the attempt has ended.
    row: the dataset row. messages: its conversation up to the answer; empty where the row is no chat. prompt: the text
    to go on from where the row is plain text. reference: the expected answer where the row has one.
    uid, sample: the prompt, and which of its attempts this is, from 0. location: where the row is, for messages.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    prompt: str | None
    reference: str | None
    uid: str
    sample: int
    location: str
