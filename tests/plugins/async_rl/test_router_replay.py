"""The experts of a response that child processes or vLLM write, maybe several in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spurline.config.run_config import ModelConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.response import Delta, Progress, Response, VllmResponse
from spurline_async_rl.engines.vllm.launch import EngineSpec, engine_arguments
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_rl.testing.rollout_engine_contract import request
from spurline_text.testing.inputs import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPT = [5, 6, 7]


def choices(engine: int, count: int) -> NDArray[np.int16]:
    """[count, 2 layers, 2]: 100 * engine + the token's index in everywhere."""
    numbers = 100 * engine + np.arange(count)
    return np.broadcast_to(numbers[:, None, None], (count, 2, 2)).astype(np.int16)


def first_of(experts: NDArray[np.int16] | None) -> list[int]:
    assert experts is not None
    return experts[:, 0, 0].tolist()


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=5))
def test_each_token_has_the_experts_of_the_engine_that_told_them_first(parts: list[tuple[int, bool]]) -> None:
    """parts: tokens that each engine writes, and whether it tells their experts before it dies."""
    total = sum(written for written, _ in parts)
    asked = GenerationRequest(PROMPT, Sampling(max_new_tokens=total + 1), 77, "a test")
    response = Response(asked, TOKENIZER)
    expected: list[int] = []
    seen = len(PROMPT)
    for engine, (written, tells) in enumerate(parts):
        part = Progress()
        part.add([40] * written, [-1.0] * written, 0)
        if tells and written:
            # All it read or wrote but the last token, from which nothing was computed.
            read = seen + written - 1
            part.experts.add(0, choices(engine, read))
            expected += [100 * engine + index for index in range(len(expected), read)]
        assert response.add(part, None) is None
        seen += written
    result = response.result("length")
    if not expected:
        assert result.routed_experts is None
        return
    assert first_of(result.routed_experts) == expected + [-1] * (seen - len(expected))


def test_experts_of_a_response_that_is_cut_at_a_stop_text_end_with_it() -> None:
    progress = Progress()
    ongoing = VllmResponse(
        request(PROMPT, stop=(TOKENIZER.decode([60, 61]),)), progress, TOKENIZER, max_model_len=100, vocabulary=300
    )
    assert ongoing.add_delta(Delta([60], [-1.0], experts=choices(1, 3)), 0) is None
    # The engine is ahead of what was read of it.
    assert ongoing.add_delta(Delta([61, 62], [-1.0] * 2, experts=choices(1, 5)[3:], experts_start=3), 0) == "stop"
    assert first_of(ongoing.result("stop").routed_experts) == [100, 101, 102, 103, 104]


def test_vllm_is_asked_for_experts_where_they_are_replayed() -> None:
    def arguments(spec: EngineSpec) -> dict[str, Any]:
        return engine_arguments(spec, on_cpu=True)

    specs = [
        EngineSpec(VllmEngineConfig(), ModelConfig(path="some/model"), notes_experts=notes) for notes in (True, False)
    ]
    assert [arguments(spec).get("enable_return_routed_experts") for spec in specs] == [True, None]
