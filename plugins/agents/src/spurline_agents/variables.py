"""Choose the variables of the run's environment that an agent's program gets: harmless ones, and those that the
config names.

The environment of a run holds keys and tokens for other things, which a program that a model steers must not get.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from spurline.errors import ConfigError, listing

_HARMLESS = """
PATH HOME USER LOGNAME SHELL PWD HOSTNAME TMPDIR TMP TEMP TERM TZ LANG LANGUAGE LD_LIBRARY_PATH DYLD_LIBRARY_PATH
XDG_CACHE_HOME XDG_CONFIG_HOME XDG_CONFIG_DIRS XDG_DATA_HOME XDG_DATA_DIRS XDG_STATE_HOME XDG_RUNTIME_DIR
PYTHONPATH PYTHONHOME PYTHONSAFEPATH PYTHONUNBUFFERED PYTHONUTF8 PYTHONIOENCODING PYTHONHASHSEED PYTHONWARNINGS
PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONNOUSERSITE VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV
DISPLAY WAYLAND_DISPLAY DOCKER_HOST DOCKER_CONTEXT PLAYWRIGHT_BROWSERS_PATH
NODE_PATH NVM_DIR JAVA_HOME GOPATH GOROOT CARGO_HOME RUSTUP_HOME
SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS
HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS TOKENIZERS_PARALLELISM
CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE
"""
_PASSED = frozenset(_HARMLESS.split())
_PASSED_BEGINNING = "LC_"
_SHORTEST_NAME_TOLD = 4
"""Shorter names appear in a complaint by chance."""
_LOGIN = re.compile(r"://[^/]*@")
_PROXY_ENDING = "_proxy"


def agent_variables(pass_env: Collection[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that a program gets.

    Args:
        pass_env: Names of variables that it gets besides the harmless ones.
        environment: The environment to choose from; this process's by default.

    Raises:
        ConfigError: Names of `pass_env` are not set.
    """
    everything = os.environ if environment is None else environment
    missing = [name for name in pass_env if name not in everything]
    if missing:
        raise ConfigError.at(
            "source.environment.pass_env",
            f"names environment variables that are not set: {listing(missing)}. Set them where the run is started, or "
            "remove them.",
        )
    return {name: value for name, value in everything.items() if name in pass_env or _is_harmless(name, value)}


def held_back_hint(complaint: str, given: Mapping[str, str]) -> str:
    """Return the fix where a program complains of variables that are set, but were not given to it; empty otherwise."""
    held_back = [name for name in os.environ if name not in given and len(name) >= _SHORTEST_NAME_TOLD]
    names = [name for name in held_back if re.search(rf"\b{re.escape(name)}\b", complaint)]
    if not names:
        return ""
    return f" Programs are not given {listing(names)}; name what this one needs in environment.pass_env."


def _is_harmless(name: str, value: str) -> bool:
    # A proxy's address may hold a password, with or without `http://` before it.
    has_login = _LOGIN.search(value) or ("@" in value and name.lower().endswith(_PROXY_ENDING))
    return (name in _PASSED or name.startswith(_PASSED_BEGINNING)) and not has_login
