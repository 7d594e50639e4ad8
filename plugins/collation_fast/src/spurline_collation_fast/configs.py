"""Settings of the plugin's collators, tokenization and prefetch. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.paths import PathSetting
from spurline.config.section import OnResume
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.protocols.prefetch import PrefetchConfig
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_text.configs import TextTokenizationConfig


def default_cache_folder() -> Path:
    """Return SPURLINE_CACHE, else ~/.cache/spurline/tokens. Raises RuntimeError if there is no home directory."""
    return Path(os.environ.get("SPURLINE_CACHE") or "~/.cache/spurline/tokens").expanduser()


class FastPaddedCollatorConfig(PaddedCollatorConfig):
    """One sample per row, padded to the longest; the same batches as `core/padded`."""


class FastPackedCollatorConfig(PackedCollatorConfig):
    """Several samples per row; the same batches as `core/packed`."""


class FastRolloutsCollatorConfig(RolloutsCollatorConfig):
    """One turn of a trajectory per row; the same batches as `rl/rollouts`."""


class ParallelTokenizationConfig(TextTokenizationConfig):
    """Encode on all cores and keep the tokens in a memory-mapped cache."""

    retired: ClassVar[tuple[str, ...]] = ("stall_timeout_s",)
    name: str = "parallel"
    # Without `strict`, `true` would mean 1.
    workers: Annotated[Literal["auto"] | Annotated[int, Field(ge=0, le=256, strict=True)], OnResume.FREE] = "auto"
    """Worker processes that read and encode rows. 0 uses the threads of the tokenizer in this process. `auto` starts
    one worker per core if there are at least four cores and 100,000 rows."""
    cache_dir: Annotated[Path | None, OnResume.FREE, PathSetting()] = None
    """Folder of the token cache. null means SPURLINE_CACHE, else ~/.cache/spurline/tokens."""
    force_recache: Annotated[bool, OnResume.FREE] = False
    """Tokenize again even if the cache has the tokens, and replace them there."""
    disable_cache: Annotated[bool, OnResume.FREE] = False
    """Neither read nor write the cache. Tokens stay in memory."""

    @property
    def cache_folder(self) -> Path | None:
        if self.disable_cache:
            return None
        with suppress(RuntimeError):
            return (self.cache_dir or default_cache_folder()).expanduser()
        return None


class AsyncPrefetchConfig(PrefetchConfig):
    """Build the batches of the next steps on a background thread."""

    name: str = "async"
    depth: Annotated[int, OnResume.FREE] = Field(default=2, ge=1, le=64)
    """Batches that are built ahead of the current training step."""
    timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds to wait for one batch before the run fails."""
