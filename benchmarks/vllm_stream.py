"""What the tokens of vLLM cost the event loop of the process that gets them.

A recorded stream of an engine's messages goes through vLLM's own client code, the engine, its member and a response's
Progress; CPU seconds of the thread, divided by the tokens. Run it with the tests' support modules at hand:

    PYTHONPATH=tests/support python benchmarks/vllm_stream.py --requests 256 --tokens 512
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from typing import Any

import numpy as np
from recorded_vllm import RecordedEngine, step_output

from spurline.protocols.rollout_engine import GenerationRequest, Sampling
from spurline.testing.inputs import tiny_tokenizer
from spurline_async_rl.engines.progress import Progress
from spurline_async_rl.engines.vllm.member import VllmMember


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="in flight, with a token each in every message")
    parser.add_argument("--tokens", type=int, default=512, help="of each response")
    parser.add_argument("--chunk-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    # What is imported with the first request is no cost of a token.
    asyncio.run(measure(8, 40))
    gc.collect()
    gc.freeze()
    measured = asyncio.run(measure(asked.requests, asked.tokens, chunk_tokens=asked.chunk_tokens))
    print(json.dumps(measured) if asked.json else "\n".join(f"{name}: {value:.2f}" for name, value in measured.items()))


async def measure(num_requests: int, num_tokens: int, **settings: Any) -> dict[str, float]:
    """Microseconds of loop CPU for a token, and for a request before its first."""
    engine = RecordedEngine(**settings)
    member: Any = VllmMember("engine 0", engine, tiny_tokenizer())
    sampling = Sampling(max_new_tokens=num_tokens)
    parts = [Progress() for _ in range(num_requests)]
    began = time.thread_time()
    writing = [
        asyncio.ensure_future(member.generate(GenerationRequest(list(range(200)), sampling, n, f"request {n}"), part))
        for n, part in enumerate(parts)
    ]
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
