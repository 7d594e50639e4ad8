"""A response that several engines write in turn is the response of one, and its tokens are those that came."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spurline_async_rl.engines.response import Progress, Response
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling
from spurline_rl.trajectory import FinishReason
from spurline_text.stop_texts import StopTexts
from spurline_text.testing.inputs import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest([5, 6], Sampling(**{"max_new_tokens": 10, **sampling}), 77, "a test")


def part(tokens: list[int], version: int = 1) -> Progress:
    written = Progress()
    written.add(tokens, [-float(token) for token in tokens], version)
    return written


def add(response: Response, written: Progress, reason: FinishReason | None) -> GenerationResult | None:
    """The response, if it has ended with this."""
    ended = response.add(written, reason)
    return None if ended is None else response.result(ended)


def test_the_rest_asks_for_what_is_left_behind_the_tokens_so_far_with_another_seed() -> None:
    response = Response(request(), TOKENIZER)
    assert response.rest() == request()
    assert add(response, Progress(), None) is None
    assert response.rest() == request()
    assert add(response, part([40, 41]), None) is None
    rest = response.rest()
    assert rest.prompt_ids == [5, 6, 40, 41]
    assert rest.sampling.max_new_tokens == 8
    assert rest.seed != 77
    assert add(response, part([42], version=2), None) is None
    assert response.rest().seed != rest.seed
    result = add(response, part([43], version=3), "stop")
    assert result is not None
    assert result.token_ids.tolist() == [40, 41, 42, 43]
    assert result.versions.tolist() == [1, 1, 2, 3]
    assert result.logprobs.tolist() == [-40, -41, -42, -43]
    assert result.finish_reason == "stop"


def test_nothing_left_to_generate_is_an_end_by_length() -> None:
    response = Response(request(max_new_tokens=2), TOKENIZER)
    result = add(response, part([40, 41]), None)
    assert result is not None
    assert result.finish_reason == "length"


def test_an_end_token_that_came_before_the_death_ends_the_response() -> None:
    for end, sampling in ((TOKENIZER.eos_token_id, {}), (50, {"stop_token_ids": (50,)})):
        result = add(Response(request(**sampling), TOKENIZER), part([40, end]), None)
        assert result is not None
        assert result.finish_reason == "stop"
    assert add(Response(request(ignore_eos=True), TOKENIZER), part([40, TOKENIZER.eos_token_id]), None) is None


LOGPROBS = st.floats(-100, 0, width=32)
CHUNKS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 200_000), LOGPROBS), max_size=5), st.integers(0, 3), st.booleans()),
    max_size=8,
)
"""Tokens with their logprobs, their version, and whether they come as arrays."""

Columns = list[list[Any]]
"""Token ids, logprobs, versions."""


def filled(chunks: list[Any]) -> tuple[Progress, Columns]:
    """The same tokens in a Progress and in plain lists."""
    progress = Progress()
    plain: Columns = [[], [], []]
    for pairs, version, as_arrays in chunks:
        tokens, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
        for column, more in zip(plain, (tokens, logprobs, [version] * len(tokens)), strict=True):
            column.extend(more)
        if as_arrays:
            # Every second value: arrays need not lie in one piece.
            wide = np.repeat(np.array(logprobs, np.float32), 2)
            progress.add(np.array(tokens, np.int32), wide[::2], version)
        else:
            progress.add(tokens, logprobs, version)
    return progress, plain


def check_columns(progress: Progress, plain: Columns) -> None:
    arrays = (progress.token_ids, progress.logprobs, progress.versions)
    assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]
    assert [array.tolist() for array in arrays] == plain
    assert len(progress) == len(plain[0])
    assert progress.last_token == (plain[0][-1] if plain[0] else None)


@given(CHUNKS, CHUNKS, st.integers(0, 50))
def test_progress_is_what_lists_of_its_tokens_would_be(first: list[Any], second: list[Any], length: int) -> None:
    progress, plain = filled(first)
    check_columns(progress, plain)
    other, more = filled(second)
    progress.extend(other)
    for column, values in zip(plain, more, strict=True):
        column.extend(values)
    check_columns(progress, plain)
    check_columns(pickle.loads(pickle.dumps(progress)), plain)  # noqa: S301 (our own)
    begun = progress.token_ids
    progress.cut(length)
    for column in plain:
        del column[length:]
    check_columns(progress, plain)
    # It can go on while somebody has what came before.
    progress.add([1], [-1.0], 9)
    assert begun.tolist()[:length] == progress.token_ids.tolist()[:-1]


@given(
    text=st.text("abc", min_size=1, max_size=30),
    stop=st.text("abc", min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_a_stop_text_is_found_wherever_the_response_was_interrupted(text: str, stop: str, cuts: list[int]) -> None:
    tokens: list[int] = TOKENIZER.encode(text)
    whole = StopTexts(TOKENIZER, [stop])
    end = next((number for number, token in enumerate(tokens, 1) if whole.completed_by(token)), None)
    response = Response(request(stop=(stop,), max_new_tokens=len(tokens) + 5), TOKENIZER)
    edges = sorted({0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)})
    result = None
    for begin, stop_at in pairwise(edges):
        # An engine finds a stop text within what it writes itself.
        own = StopTexts(TOKENIZER, [stop])
        written = tokens[begin:stop_at]
        seen = next((number for number, token in enumerate(written, 1) if own.completed_by(token)), None)
        ends = seen is not None or stop_at == len(tokens)
        result = add(response, part(written[:seen]), ("stop" if seen is not None else "length") if ends else None)
        if result is not None:
            break
    assert result is not None
    assert result.token_ids.tolist() == tokens[:end]
    assert result.finish_reason == ("length" if end is None else "stop")
