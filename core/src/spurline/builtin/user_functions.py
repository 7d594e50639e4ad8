"""Import functions that a config names as `module:function`: rewards and tools that need no plugin."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from spurline.registry import resolve


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function, from anything importable or a file in the working directory. Raises PluginError naming `what`."""
    # A console script does not see the folder it is started in, where a config's functions usually are. Last on the
    # path, so that no file there hides an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return resolve(path, what)
