"""Measure the CPU time that each token of vLLM costs the event loop of the receiving process.

    python benchmarks/vllm_stream.py [--json] [--requests 256] [--tokens 512] [--chunk-tokens 16] [--actor]

A recorded stream of engine messages goes through vLLM's own client code, the engine, its member, and the `Progress` of
each response. The figure is the CPU time of the thread, divided by the number of tokens. With --actor, client code and
engine run in a Ray actor, which gives every request a token 33 times a second. The figure is then the CPU time of the
controller.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ray
import ray.cloudpickle

from spurline.config.run_config import ModelConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.response import Progress
from spurline_async_rl.engines.vllm import ray as engines_on_ray
from spurline_async_rl.engines.vllm.engine import VllmMember
from spurline_async_rl.engines.vllm.launch import EngineSpec
from spurline_async_rl.engines.vllm.ray import EngineActor
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_text.testing.inputs import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import recorded_vllm
from recorded_vllm import RecordedEngine, step_output

_STEP_S = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="requests in flight; a message has a token for each")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each response")
    parser.add_argument("--chunk-tokens", type=int, default=16)
    parser.add_argument("--actor", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.actor:
        measured = asyncio.run(measure_actor(asked.requests, asked.tokens, chunk_tokens=asked.chunk_tokens))
        _print(measured, asked.json)
        return
    # The first requests import modules, whose cost must not count.
    asyncio.run(measure(8, 40, chunk_tokens=asked.chunk_tokens))
    gc.collect()
    gc.freeze()
    measured = asyncio.run(measure(asked.requests, asked.tokens, chunk_tokens=asked.chunk_tokens))
    _print(measured, asked.json)


def _print(measured: dict[str, float], as_json: bool) -> None:
    print(json.dumps(measured) if as_json else "\n".join(f"{name}: {value:.2f}" for name, value in measured.items()))


async def measure(num_requests: int, num_tokens: int, **settings: Any) -> dict[str, float]:
    """Return the event loop's CPU microseconds for each token, and for each request before its first token."""
    engine = RecordedEngine(**settings)
    member: Any = VllmMember("engine 0", engine, tiny_tokenizer())
    began = time.thread_time()
    writing, parts = _written(member, num_requests, num_tokens)
    core: Any = engine.core
    while len(core.requests) < num_requests:
        await asyncio.sleep(0)
        _raise_failed(writing)
    set_up = time.thread_time() - began
    messages = _messages(core, num_requests, num_tokens)
    began = time.thread_time()
    for frames in messages:
        core.receive(frames)
        while not core.outputs_queue.empty():
            await asyncio.sleep(0)
            _raise_failed(writing[:1])
    await asyncio.gather(*writing)
    spent = time.thread_time() - began
    assert all(len(part) == num_tokens for part in parts)
    return {
        "us_per_token": spent / (num_requests * num_tokens) * 1e6,
        "us_per_request_before_its_first_token": set_up / num_requests * 1e6,
    }


class RecordedActor(EngineActor):
    """Replaces `EngineActor`. A step of its engine gives every request a token."""

    def __init__(self, spec: EngineSpec, log: str | None):
        super().__init__(spec, log)
        self._engine = RecordedEngine(chunk_tokens=spec.config.chunk_tokens)
        self._core: Any = self._engine.core

    async def start(self) -> tuple[int, int, str, str]:
        self._steps = asyncio.create_task(self._step())
        return self._engine.max_model_len, self._engine.vocabulary, "float32", "recorded"

    async def _step(self) -> None:
        made: dict[str, int] = {}
        while True:
            await asyncio.sleep(_STEP_S)
            outputs: list[Any] = []
            for request in self._core.requests.values():
                count = made[request.request_id] = made.get(request.request_id, 0) + 1
                longest = request.sampling_params.max_tokens
                if count <= longest:
                    reason = "length" if count == longest else None
                    outputs.append(step_output(request.request_id, [50 + count % 200], [-0.5], reason))
            if outputs:
                self._core.receive(self._core.encoded(outputs))


async def measure_actor(num_requests: int, num_tokens: int, **settings: Any) -> dict[str, float]:
    """Return the controller's CPU microseconds for each token: of its event loop, and of all threads with Ray's."""
    # Actors do not search the folders in which this script finds its modules.
    ray.cloudpickle.register_pickle_by_value(recorded_vllm)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    engines_on_ray.EngineActor = RecordedActor
    place = SimpleNamespace(reserve=_nothing, actor_options=lambda _: {"num_cpus": 1}, release=print)
    spec = EngineSpec(VllmEngineConfig(**settings), ModelConfig(path="recorded"))
    engine = engines_on_ray.RayEngine(spec, cast(Any, place))
    await engine.start()
    member = VllmMember("engine 0", engine, tiny_tokenizer())
    await asyncio.gather(*_written(member, 8, 40)[0])
    gc.collect()
    gc.freeze()
    of_loop, of_all = time.thread_time(), time.process_time()
    writing, parts = _written(member, num_requests, num_tokens)
    await asyncio.gather(*writing)
    of_loop, of_all = time.thread_time() - of_loop, time.process_time() - of_all
    assert all(len(part) == num_tokens for part in parts)
    num = num_requests * num_tokens
    return {"us_per_token": of_loop / num * 1e6, "us_per_token_of_all_threads": of_all / num * 1e6}


async def _nothing() -> None:
    pass


def _written(member: Any, num_requests: int, num_tokens: int) -> tuple[list[asyncio.Future[Any]], list[Progress]]:
    """Return the tasks that generate responses, and the `Progress` of each response."""
    sampling, prompt = Sampling(max_new_tokens=num_tokens), list(range(200))
    parts = [Progress() for _ in range(num_requests)]
    asked = [GenerationRequest(prompt, sampling, n, f"request {n}") for n in range(num_requests)]
    return [asyncio.ensure_future(member.generate(*pair)) for pair in zip(asked, parts, strict=True)], parts


def _raise_failed(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def _messages(core: Any, num_requests: int, num_tokens: int) -> list[Any]:
    names = [request.request_id for request in core.requests.values()]
    draw = np.random.default_rng(0)
    tokens = draw.integers(50, 250, (num_tokens, num_requests))
    logprobs = -draw.random((num_tokens, num_requests))
    return [
        core.encoded(
            [
                step_output(name, [int(tokens[n, k])], [logprobs[n, k]], "length" if n + 1 == num_tokens else None)
                for k, name in enumerate(names)
            ]
        )
        for n in range(num_tokens)
    ]


if __name__ == "__main__":
    main()
