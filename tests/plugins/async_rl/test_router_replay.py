"""The experts of a response that child processes or vLLM write, maybe several in turn."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spurline.config.run_config import ModelConfig
from spurline.protocols.rollout_engine import GenerationRequest, Sampling
from spurline.testing.inputs import tiny_tokenizer
from spurline.testing.rollout_engine_contract import request
from spurline_async_rl.engines.child.experts import of_plain, to_plain
from spurline_async_rl.engines.configs import ChildProcessEngineConfig, VllmEngineConfig
from spurline_async_rl.engines.continuation import Response
from spurline_async_rl.engines.member import Progress
from spurline_async_rl.engines.vllm.async_engine import ChosenExperts
from spurline_async_rl.engines.vllm.launch import EngineSpec, engine_arguments
from spurline_async_rl.engines.vllm.member import Delta, VllmResponse

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
        part = Progress([40] * written, [-1.0] * written, [-1.0] * written, [0] * written)
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


class OutputProcessor:
    """As vLLM's, with the requests under way by ids of its own."""

    def __init__(self, chunks: list[NDArray[Any]] | None) -> None:
        self.external_req_ids = {} if chunks is None else {"7": ["7-inner"]}
        self.request_states = {} if chunks is None else {"7-inner": SimpleNamespace(routed_experts_chunks=chunks)}


def test_choices_are_taken_from_vllm_as_they_come_and_once() -> None:
    chunks: list[NDArray[Any]] = [choices(0, 3).astype(np.uint8)]
    processor = OutputProcessor(chunks)
    chosen = ChosenExperts(processor, "7")
    experts, start = chosen.more(None)
    assert (first_of(experts), start) == ([0, 1, 2], 0)
    assert experts is not None
    assert experts.dtype == np.int16
    assert chosen.more(None) == (None, 3)
    chunks += [choices(0, 4)[3:], choices(0, 5)[4:]]
    # With the last token it forgets the request, and its list is all there is.
    processor.request_states.clear()
    experts, start = chosen.more(choices(0, 5))
    assert (first_of(experts), start) == ([3, 4], 3)


def test_a_response_of_one_delta_has_what_came_with_it() -> None:
    chosen = ChosenExperts(OutputProcessor(None), "7")
    experts, start = chosen.more(choices(0, 3))
    assert (first_of(experts), start) == ([0, 1, 2], 0)
    assert ChosenExperts(OutputProcessor(None), "7").more(None) == (None, 0)


def test_vllm_is_asked_for_experts_where_they_are_replayed() -> None:
    def arguments(spec: EngineSpec) -> dict[str, Any]:
        return engine_arguments(EngineSpec.from_plain(spec.to_plain()), on_cpu=True)

    specs = [
        EngineSpec(VllmEngineConfig(), ModelConfig(path="some/model"), notes_experts=notes) for notes in (True, False)
    ]
    assert [arguments(spec).get("enable_return_routed_experts") for spec in specs] == [True, None]


def test_engines_say_whether_they_note_experts() -> None:
    server = VllmEngineConfig(mode="server", urls=("http://node1:8000",))
    engines: Sequence[Any] = (ChildProcessEngineConfig(), VllmEngineConfig(), server)
    assert [engine.notes_experts for engine in engines] == [True, True, False]


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4))
def test_choices_survive_a_message(tokens: int, layers: int, top_k: int) -> None:
    experts = np.random.default_rng(0).integers(-1, 300, (tokens, layers, top_k)).astype(np.int16)
    found = of_plain(to_plain(experts))
    assert found.dtype == np.int16
    assert np.array_equal(found, experts)
