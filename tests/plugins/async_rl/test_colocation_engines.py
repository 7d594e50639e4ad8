"""Engines in child processes really give their memory away while they sleep, and go on where they were."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import torch
from child_engines import child_engine, publish
from generated_rollouts import in_process_engine
from transformers import AutoConfig, AutoModelForCausalLM

from spurline.errors import RunFailedError
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling

PROMPT = tuple(range(5, 25))
WIDE = {"hidden_size": 512, "intermediate_size": 8192, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def wide_model(spurline_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that its weights stand out in a process's memory."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(spurline_tiny_model, **WIDE))
    model.float().save_pretrained(folder)
    return folder


def request(name: str, tokens: int) -> GenerationRequest:
    return GenerationRequest(PROMPT, Sampling(temperature=1.0, max_new_tokens=tokens), seed=7, name=name)


def anonymous_memory(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@pytest.mark.processes
def test_a_child_engine_gives_its_weights_memory_away_while_it_sleeps_and_goes_on_afterwards(
    wide_model: Path, spurline_tiny_model: Path, tmp_path: Path
) -> None:
    weights = sum(path.stat().st_size for path in wide_model.glob("*.safetensors"))

    async def main() -> None:
        others = {*psutil.Process().children(recursive=True)}
        engine = child_engine(spurline_tiny_model, tmp_path, model_folder=wide_model, deterministic=True)
        try:
            await publish(engine, 0, wide_model)
            expected = await engine.generate(request("before", 40))
            process = max({*psutil.Process().children(recursive=True)} - others, key=anonymous_memory)
            awake = anonymous_memory(process)

            in_flight = asyncio.create_task(engine.generate(request("in flight", 40)))
            await asyncio.sleep(0.05)
            await engine.sleep(keep_weights=False)
            asleep = anonymous_memory(process)
            assert awake - asleep > 0.95 * weights, f"{awake - asleep:,} of {weights:,} bytes"
            assert not in_flight.done()
            late = asyncio.create_task(engine.generate(request("late", 40)))

            await engine.wake("weights")
            await publish(engine, 1, wide_model)
            await asyncio.sleep(0.05)
            assert not late.done(), "generates before the cache is awake"
            await engine.wake("cache")
            went_on, new = await asyncio.wait_for(asyncio.gather(in_flight, late), 60)
            for result in (went_on, new):
                assert result.token_ids.tolist() == expected.token_ids.tolist()
                torch.testing.assert_close(
                    torch.from_numpy(result.logprobs), torch.from_numpy(expected.logprobs), rtol=0, atol=1e-5
                )
            assert set(new.versions.tolist()) == {1}
            # At least its first tokens or its last ones, and none twice.
            assert set(went_on.versions.tolist()) <= {0, 1}
            # Its values come with the update, into the memory that it took back.
            assert anonymous_memory(process) - asleep > 0.95 * weights

            await engine.sleep(keep_weights=True)
            await engine.wake("weights")
            await engine.wake("cache")
            kept = await engine.generate(request("kept", 40))
            assert kept.logprobs.tolist() == new.logprobs.tolist()
        finally:
            await engine.close()

    asyncio.run(main())


def test_an_engine_that_slept_without_weights_generates_nothing_before_they_came(spurline_tiny_model: Path) -> None:
    async def main() -> None:
        engine = in_process_engine(spurline_tiny_model, deterministic=True)
        await engine.generate(request("before", 3))
        await engine.sleep(keep_weights=False)
        await engine.wake("weights")
        with pytest.raises(RunFailedError, match="slept without weights, and no update"):
            await engine.wake("cache")
        with pytest.raises(RunFailedError, match="slept without weights"):
            await engine.generate(request("after", 3))
        await engine.close()

    asyncio.run(main())


def test_responses_under_way_go_on_after_a_sleep_as_if_there_had_been_none(spurline_tiny_model: Path) -> None:
    async def main() -> None:
        engine = in_process_engine(spurline_tiny_model, deterministic=True)
        expected = await engine.generate(request("alone", 12))
        written = asyncio.Event()
        going = asyncio.create_task(engine.generate(request("under way", 12), lambda _: written.set()))
        await written.wait()
        for _ in range(2):
            await engine.sleep(keep_weights=True)
            await engine.wake("weights")
            assert not going.done()
            await engine.wake("cache")
        result = await going
        assert result.token_ids.tolist() == expected.token_ids.tolist()
        assert abs(result.logprobs - expected.logprobs).max() < 1e-5
        await engine.close()

    asyncio.run(main())
