"""Rollout engine `child_process`: core's engine `in_process`, in processes of its own.

Place on the way: pool -> `ChildMember` -> pipe -> `main.py` in the child -> the Hugging Face model. Generation thus has
cores of its own, and never holds up the event loop, the training or the interpreter of this process.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import RunConfig
from spurline_async_rl.engines.child.member import ChildMember
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.engines.pool import EnginePool


class ChildProcessEngine(EnginePool):
    """A `RolloutEngine` that `TakesWeights`; what the engines print goes to `engines/` in the run directory."""

    def __init__(self, config: ChildProcessEngineConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(
            config,
            lambda number: ChildMember(f"engine {number}", config, run),
            transports=ChildMember.transports,
            tokenizer=tokenizer,
        )
