"""vLLM takes an adapter alone, from memory: its tokens are PEFT's, before, during and after every update."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import pytest
import torch
from every_run import IN_LONG_RUNS
from numpy.typing import NDArray
from publish_proofs import ProvenPublishes
from sabotages import IN_FLIGHT, KINDS, PREFIX_CACHE
from safetensors.torch import load_file
from torch import Tensor
from vllm_engines import (
    LIMIT_S,
    START_S,
    HeldEngine,
    collective,
    disk,
    engine_processes,
    shared_memory,
    vllm_engine,
    vllm_models,
)

from spurline.errors import RunFailedError
from spurline_async_rl.engines.vllm.adapters import _RANKS
from spurline_async_rl.weights.buckets import cut
from spurline_async_rl.weights.shared_memory import MemoryMaker
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.protocols.weight_sync import SyncReport
from spurline_rl.testing.rollout_engine_contract import PROMPTS, request

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

    def __init__(self, folder: Path, change: Callable[[dict[str, Tensor]], object] | None) -> None:
        self._folder = folder
        self._change = change

    def adapter_settings(self) -> Mapping[str, Any] | None:
        return adapter_settings(self._folder)

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        tensors = adapter_tensors(self._folder)
        if self._change is not None:
            self._change(tensors)
        yield from tensors.items()


async def send(engine: Any, version: int, adapter: Path, sync: Any = None, *, change: Any = None) -> SyncReport:
    """Bring the engine this adapter, in several buckets. sync: through shared memory where none is given."""
    sync = sync or shared_memory()
    sync.max_bucket_bytes = 4_000
    try:
        backend: Any = AdapterOf(adapter, change)
        return await sync.publish(version, backend, [engine])
    finally:
        sync.close()


class OneAdaptedEngine(HeldEngine):
    """A vLLM engine of one model with room for an adapter."""

    def __init__(self, model: Path, folder: Path, lora: LoraConfig = LORA, **settings: Any) -> None:
        super().__init__(folder)
        self.model, self._lora, self._settings = model, lora, settings

    def use(self, use: Callable[[Any], Awaitable[Result]]) -> Result:
        """Return the result of `use(engine)`. The engine keeps its adapter from call to call; at first it has none."""

        async def main() -> Result:
            if self.engine is None:
                self.engine = vllm_engine(
                    self.model, self.folder, backend=LocalBackendConfig(lora=self._lora), **self._settings
                )
                async with asyncio.timeout(START_S):
                    await self.engine.start()
            async with asyncio.timeout(LIMIT_S):
                return await use(self.engine)

        return self.run(main())


pytest.importorskip("vllm")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800), pytest.mark.usefixtures("warm_vllm")]

TOLERANCE = 1e-4
"""Between logprobs of vLLM, which adds the adapter's product to that of the weights, and of PEFT's model in fp32."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneAdaptedEngine]:
    folder = tmp_path_factory.mktemp("vllm-adapters")
    # After an error in a worker, vLLM does not end by itself.
    engine = OneAdaptedEngine(vllm_models(folder, "tied").old, folder, close_timeout_s=5)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def adapters(one: OneAdaptedEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Of versions 1 to 3."""
    folder = tmp_path_factory.mktemp("adapters")
    return {version: write_adapter(folder / str(version), one.model, version) for version in (1, 2, 3)}


def check(one: OneAdaptedEngine, asked: GenerationRequest, result: GenerationResult, adapters: dict[int, Path]) -> None:
    """Each token has the logprob of the adapter of its own version, and of no other."""
    tokens = result.token_ids.tolist()
    for version, adapter in adapters.items():
        own = result.versions == version
        expected = adapted_logprobs(one.model, adapter, asked.prompt_ids, tokens, asked.sampling.temperature)
        difference = np.abs(result.logprobs - expected)
        assert difference[own].max(initial=0.0) <= TOLERANCE
        assert not (~own).any() or difference[~own].max() > 100 * TOLERANCE


def test_tokens_are_those_of_each_adapter_in_turn_and_change_between_two_tokens(
    one: OneAdaptedEngine, adapters: dict[int, Path], tmp_path: Path
) -> None:
    syncs = {1: collective(), 2: shared_memory(), 3: disk(tmp_path)}
    asked = [request(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    long = [request(prompt, seed=seed, max_new_tokens=300) for seed, prompt in enumerate(PROMPTS * 2, 10)]

    async def use(engine: Any) -> tuple[list[list[GenerationResult]], list[GenerationResult]]:
        assert engine.takes_adapters
        rounds: list[list[GenerationResult]] = []
        for version, adapter in adapters.items():
            report = await send(engine, version, adapter, syncs[version])
            assert report.bytes_sent == sum(tensor.nbytes for tensor in adapter_tensors(adapter).values())
            rounds.append(await asyncio.gather(*map(engine.generate, asked)))
        writing = asyncio.gather(*map(engine.generate, long))
        await engine.generate(request(PROMPTS[0], max_new_tokens=4, temperature=0.0))
        await send(engine, 1, adapters[1])
        return rounds, await writing

    rounds, crossing = one.use(use)
    for version, results in zip(adapters, rounds, strict=True):
        for wanted, result in zip(asked, results, strict=True):
            assert set(result.versions.tolist()) == {version}
            check(one, wanted, result, adapters)
    for wanted, result in zip(long, crossing, strict=True):
        check(one, wanted, result, {version: adapters[version] for version in (3, 1)})
    assert any({1, 3} <= set(result.versions.tolist()) for result in crossing)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("never updated", PREFIX_CACHE, IN_FLIGHT) else IN_LONG_RUNS)
        for kind in KINDS
        if kind != "head"
    ],
)
def test_an_adapter_that_is_confirmed_but_not_used_is_found_out(
    one: OneAdaptedEngine, adapters: dict[int, Path], kind: str
) -> None:
    async def start(_: Any) -> None:
        """Start the engine, if no test has."""

    one.use(start)
    publishes = ProvenPublishes(one, one.model, send, partial(adapted_logprobs, one.model))
    publishes.assert_found_out(kind, [adapters[version] for version in (1, 2, 3)])


def test_an_adapter_with_other_tensors_is_an_error_that_names_them_and_changes_nothing(
    one: OneAdaptedEngine, adapters: dict[int, Path]
) -> None:
    query, down = (
        f"base_model.model.model.layers.1.{module}.lora_{part}.weight"
        for module, part in (("self_attn.q_proj", "A"), ("mlp.down_proj", "B"))
    )
    foreign = query.replace("q_proj", "k_proj")
    mistakes: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
        "missing": (lambda tensors: tensors.pop(down), r"lacks model\.layers\.1\.mlp\.down_proj\.lora_B"),
        "not a target": (lambda tensors: tensors.update({foreign: tensors[query]}), f"fit no layer .*: {foreign}"),
        "no adapter": (lambda tensors: tensors.update(weight=tensors[query]), "fit no layer .*: weight"),
    }
    settings = adapter_settings(adapters[2])
    asked = request(PROMPTS[0])

    async def use(engine: Any) -> GenerationResult:
        await send(engine, 1, adapters[1])
        workers = engine._engines[0]._member._engine
        # As the member tells its workers, but without the end of the engine that an error is to the pool.
        for name, (change, message) in mistakes.items():
            tensors = adapter_tensors(adapters[2])
            change(tensors)
            await workers._call("spurline_begin_adapter_update", settings)
            for bucket in buckets(2, {name: tensor.contiguous() for name, tensor in tensors.items()}):
                await workers._call("spurline_load_bucket", bucket.to_plain())
            with pytest.raises(RunFailedError, match=message):
                await workers._call("spurline_finish_update")
            assert name
        for change, message in (({"r": 99}, "rank 99"), ({"use_dora": True}, "DoRA")):
            with pytest.raises(RunFailedError, match=message):
                await workers._call("spurline_begin_adapter_update", settings | change)
        with pytest.raises(RunFailedError, match="for adapters, but was sent whole weights"):
            await workers._call("spurline_begin_update")
        return await engine.generate(asked)

    check(one, asked, one.use(use), {1: adapters[1]})


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts another engine; SPURLINE_SOAK=1")
def test_an_engine_that_is_started_anew_has_the_weights_below_and_gets_the_adapter(
    one: OneAdaptedEngine, adapters: dict[int, Path]
) -> None:
    asked = [request(prompt, seed=seed, max_new_tokens=400) for seed, prompt in enumerate(PROMPTS)]

    async def use(engine: Any) -> list[GenerationResult]:
        await send(engine, 1, adapters[1])
        awaiting = asyncio.Event()
        engine.on_awaiting_weights = awaiting.set
        writing = asyncio.gather(*map(engine.generate, asked))
        await engine.generate(request(PROMPTS[0], max_new_tokens=4, temperature=0.0))
        core = next(process for process in engine_processes() if "EngineCore" in process.cmdline()[0])
        os.kill(core.pid, signal.SIGKILL)
        await awaiting.wait()
        (late,) = engine.awaiting_weights
        assert late.takes_adapters
        await send(late, 2, adapters[2])
        return await writing

    results = one.use(use)
    for wanted, result in zip(asked, results, strict=True):
        check(one, wanted, result, {version: adapters[version] for version in (1, 2)})
    assert any({1, 2} <= set(result.versions.tolist()) for result in results)


def test_the_ranks_that_are_asked_for_are_those_that_vllm_knows() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == _RANKS
