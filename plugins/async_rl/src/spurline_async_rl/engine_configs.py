"""Config sections of engines that run in processes of their own. Light: imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spurline.config.section import ComponentConfig, OnResume


class PoolConfig(ComponentConfig):
    """Base of engines of which there may be several."""

    engines: Annotated[int, OnResume.FREE] = Field(default=1, gt=0)
    """How many; requests go to the one with least to do, those of one prompt to the same one where that costs
    little."""
    start_timeout_s: Annotated[float, OnResume.FREE] = Field(default=900.0, gt=0)
    """Seconds an engine may take to load."""
    generate_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds without a new token of a response, pauses not counted, after which its engine counts as dead."""
    pause_timeout_s: Annotated[float, OnResume.FREE] = Field(default=120.0, gt=0)
    """Seconds until every engine has to stand still."""
    update_timeout_s: Annotated[float, OnResume.FREE] = Field(default=120.0, gt=0)
    """Seconds an engine may take for one bucket of weights, or to begin or finish an update, before it is replaced;
    less than weight_sync.timeout_s, so that the others go on."""
    close_timeout_s: Annotated[float, OnResume.FREE] = Field(default=60.0, gt=0)
    """Seconds an engine may take to end before its processes are killed."""
    max_restarts: Annotated[int, OnResume.FREE] = Field(default=16, ge=0)
    """Engines that may be started anew after they died, in the whole run, before it stops."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """After new weights, compute keys and values of responses in flight anew, which is exact, or keep those of the old
    weights: faster, and approximate, as later tokens then come from neither version."""


class ChildProcessEngineConfig(PoolConfig):
    """The Hugging Face model in processes of its own: for CPUs, small models and tests."""

    name: str = "child_process"
    deterministic: bool = False
    """As of engine `in_process`."""
    max_batch: int = Field(default=256, gt=0)
    """As of engine `in_process`."""
    max_cache_tokens: int = Field(default=262_144, gt=0)
    """As of engine `in_process`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engines' copies of the model are."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """As of engine `in_process`."""
    num_threads: Annotated[int | None, OnResume.FREE] = Field(default=1, gt=0)
    """CPU threads of each engine; null leaves torch's choice."""
