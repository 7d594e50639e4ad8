"""Adapters that PEFT has written, one vLLM engine that takes them alone, and what PEFT's own model says of tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from vllm_engines import LIMIT_S, START_S, shared_memory, vllm_engine

from spurline_async_rl.weights.packing import cut
from spurline_async_rl.weights.shared_memory import MemoryMaker
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_rl.protocols.weight_sync import SyncReport

Result = TypeVar("Result")

LORA = LoraConfig(rank=5, alpha=7.0, target_modules=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
"""A rank that vLLM has no room of its own for, a scale that is no power of 2, and parts of layers that vLLM joins."""


def write_adapter(folder: Path, model: Path, seed: int, lora: LoraConfig = LORA) -> Path:
    """An adapter of this model with all its matrices random, as PEFT writes one."""
    import peft
    from transformers import AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    adapted: Any = peft.get_peft_model(causal, settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


def adapter_settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def adapted_logprobs(
    model: Path, adapter: Path, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Return the logprob of each response token by a forward pass of PEFT's model, adapter not merged."""
    tokens = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = _load(model, adapter)(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()


@cache
def _load(model: Path, adapter: Path) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(causal, adapter).eval()


def buckets(version: int, tensors: Mapping[str, Tensor], max_bytes: int = 4_000) -> Iterator[Any]:
    """Yield the tensors in several buckets of shared memory. Each is valid until the next one is made."""
    maker = MemoryMaker(max_bytes)
    try:
        for number, held in enumerate(cut(tensors.items(), max_bytes), 1):
            yield maker.make(version, number, held)
            maker.taken()
    finally:
        maker.close()


class AdapterOf:
    """A backend for a publish. It trains the adapter in this folder, and has no whole weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def adapter_settings(self) -> Mapping[str, Any] | None:
        return adapter_settings(self._folder)

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from adapter_tensors(self._folder).items()


async def send(engine: Any, version: int, adapter: Path, sync: Any = None) -> SyncReport:
    """Bring the engine this adapter, in several buckets. sync: through shared memory where none is given."""
    sync = sync or shared_memory()
    sync.max_bucket_bytes = 4_000
    try:
        backend: Any = AdapterOf(adapter)
        return await sync.publish(version, backend, [engine])
    finally:
        sync.close()


class OneAdaptedEngine:
    """A vLLM engine of one model with room for an adapter, on an event loop of its own."""

    def __init__(self, model: Path, folder: Path, lora: LoraConfig = LORA, **settings: Any) -> None:
        self.model, self._folder, self._lora, self._settings = model, folder, lora, settings
        self._engine: Any = None
        self._runner = asyncio.Runner()

    def use(self, use: Callable[[Any], Awaitable[Result]]) -> Result:
        """Return the result of `use(engine)`. The engine keeps its adapter from call to call; at first it has none."""

        async def main() -> Result:
            if self._engine is None:
                self._engine = vllm_engine(
                    self.model, self._folder, backend=LocalBackendConfig(lora=self._lora), **self._settings
                )
                async with asyncio.timeout(START_S):
                    await self._engine.start()
            async with asyncio.timeout(LIMIT_S):
                return await use(self._engine)

        try:
            return self._runner.run(main())
        except BaseException:
            # The state of the engine is unknown.
            self._runner.run(self._close())
            raise

    def end(self) -> None:
        """Close the engine; the next test gets another one."""
        self._runner.run(self._close())

    def close(self) -> None:
        self.end()
        self._runner.close()

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
