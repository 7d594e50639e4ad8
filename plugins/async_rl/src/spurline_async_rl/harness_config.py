"""Config section of environment `harness`. Light: imports no torch."""

from __future__ import annotations

from pydantic import Field

from spurline.config.section import ComponentConfig


class HarnessConfig(ComponentConfig):
    """Any agent that takes the base URL of an OpenAI-compatible endpoint."""

    name: str = "harness"
    agent: str = Field(min_length=1)
    """`my_module:my_function`, which gets a session (base URL, key, row) and returns the attempt's rewards."""
