"""Spurline: a plugin-based toolkit for LLM post-training.

The Python API is `from spurline import load_config, Run`, and `spurline --help` lists the commands. Importing this
package loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from spurline.importing import importing

if TYPE_CHECKING:
    from spurline.config.loading import load_config as load_config
    from spurline.run.run import Run as Run

__version__ = importlib.metadata.version("spurline")

_LAZY = {"load_config": "spurline.config.loading", "Run": "spurline.run.run"}

__all__ = ["Run", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'spurline' has no attribute '{name}'")
    with importing():
        return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
