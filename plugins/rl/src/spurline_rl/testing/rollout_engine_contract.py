"""Check that a rollout engine returns the model's tokens and logprobs, and ends responses at the right token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spurline.errors import DataError, RunFailedError
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, RolloutEngine, Sampling
from spurline_text.testing.inputs import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")

PROMPTS = ([40, 41, 42, 43, 44, 45, 46], [50], [60, 61, 62], [70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80], [90, 91])


class EngineContract:
    """Base class of the test suites for engines. Each test runs a new engine on a new event loop.

    Attributes:
        logprob_tolerance: Largest difference from the logprobs that transformers computes in fp32.
        limit_s: Seconds that one test may wait for the engine.
    """

    logprob_tolerance = 1e-5
    limit_s = 120.0

    def make_engine(self, model: Path) -> Any:
        """Return your engine with the weights of this folder. The event loop is already running."""
        raise NotImplementedError("subclass the contract of engines with make_engine(self, model)")

    def run(self, model: Path, use: Callable[[RolloutEngine], Awaitable[Result]]) -> Result:
        """Return the result of calling `use` with an engine on a new event loop. The engine is closed afterwards."""

        async def main() -> Result:
            engine = self.make_engine(model)
            try:
                return await asyncio.wait_for(use(engine), self.limit_s)
            finally:
                await engine.close()

        return asyncio.run(main())


class RolloutEngineContract(EngineContract):
    """A test suite: define `make_engine(model)`. `EngineContract` explains `logprob_tolerance` and `limit_s`."""

    @pytest.fixture
    def tiny_model(self, spurline_tiny_model: Path) -> Path:
        """Return the folder of the tiny model. Override this for another architecture."""
        return spurline_tiny_model

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
    def test_results_have_their_types_and_the_logprobs_of_the_sampled_distribution(
        self, tiny_model: Path, temperature: float
    ) -> None:
        requests = [request(prompt, temperature=temperature) for prompt in PROMPTS]
        for asked, result in zip(requests, self.generate(tiny_model, requests), strict=True):
            assert 1 <= len(result.token_ids) <= 12
            assert (result.token_ids.dtype, result.versions.dtype) == (np.int32, np.int32)
            assert len(result.versions) == len(result.token_ids)
            expected = model_logprobs(tiny_model, asked.prompt_ids, result.token_ids.tolist(), temperature)
            assert (result.logprobs.dtype, result.logprobs.shape) == (np.float32, expected.shape)
            assert np.abs(result.logprobs - expected).max() <= self.logprob_tolerance

    def test_temperature_zero_and_a_single_candidate_take_the_likeliest_token_each_time(self, tiny_model: Path) -> None:
        requests = [request(prompt, temperature=0.0) for prompt in PROMPTS]
        *results, single = self.generate(tiny_model, [*requests, request(PROMPTS[0], top_k=1)])
        for asked, result in zip(requests, results, strict=True):
            assert result.token_ids.tolist() == greedy(tiny_model, asked.prompt_ids, 12)
        assert single.token_ids.tolist() == results[0].token_ids.tolist()
        assert not single.logprobs.any()

    def test_top_p_and_top_k_cut_tokens_off_and_the_rest_is_reported_where_it_is_asked_for(
        self, tiny_model: Path
    ) -> None:
        cuts: Sequence[dict[str, Any]] = ({"top_k": 6}, {"top_k": 300}, {"top_k": 40, "top_p": 0.7, "temperature": 0.6})
        requests = [
            request(prompt, support_width=cut["top_k"] + 16, **cut)
            for prompt, cut in zip(PROMPTS, (*cuts, *cuts), strict=False)
        ]
        *results, plain = self.generate(tiny_model, [*requests, request(PROMPTS[0])])
        assert plain.support is None
        for asked, result in zip(requests, results, strict=True):
            assert result.support is not None
            assert result.support.dtype == np.int32
            assert result.support.shape == (len(result.token_ids), asked.sampling.support_width)
            given = (asked.prompt_ids, result.token_ids.tolist(), asked.sampling.temperature)
            everything = _all_logprobs(tiny_model, *given)
            kept = np.stack([np.isin(np.arange(everything.shape[1]), row) for row in result.support])
            assert kept.sum(1).tolist() == (result.support >= 0).sum(1).tolist(), "an id is there twice"
            # No token that was cut off is likelier than one that was kept.
            likeliest_cut, worst = np.where(kept, -np.inf, everything).max(1), np.where(kept, everything, np.inf).min(1)
            assert (likeliest_cut <= worst + self.logprob_tolerance).all()
            largest = min(asked.sampling.top_k, everything.shape[1])
            assert (kept.sum(1) == largest).all() if asked.sampling.top_p == 1 else (kept.sum(1) < largest).all()
            expected = model_logprobs(tiny_model, *given, result.support)
            assert np.abs(result.logprobs - expected).max() <= self.logprob_tolerance

    def test_the_seed_decides_what_is_sampled(self, tiny_model: Path) -> None:
        requests = [request(PROMPTS[0], seed=seed, temperature=2.0) for seed in (5, 5, 6, 7)]
        first, second = (
            [tuple(result.token_ids.tolist()) for result in self.generate(tiny_model, requests)] for _ in range(2)
        )
        assert first == second
        assert first[0] == first[1]
        assert len(set(first)) == 3

    def test_a_response_ends_at_the_limit_or_with_a_stop_token_which_belongs_to_it(self, tiny_model: Path) -> None:
        free = greedy(tiny_model, PROMPTS[0], 12)
        counts = (1, 2, 7)
        requests = [request(PROMPTS[0], max_new_tokens=count) for count in counts]
        requests.append(request(PROMPTS[0], temperature=0.0, stop_token_ids=(free[3],)))
        *cut, stopped = self.generate(tiny_model, requests)
        assert [(len(result.token_ids), result.finish_reason) for result in cut] == [
            (count, "length") for count in counts
        ]
        assert stopped.token_ids.tolist() == free[: free.index(free[3]) + 1]
        assert stopped.finish_reason == "stop"

    def test_a_response_ends_with_the_token_that_completes_a_stop_text(self, tiny_model: Path) -> None:
        tokenizer = tiny_tokenizer()
        prompt, free, stop = next(
            (prompt, free, text)
            for prompt, free in ((prompt, greedy(tiny_model, prompt, 12)) for prompt in PROMPTS)
            for text in (tokenizer.decode(free[end - 2 : end]) for end in range(2, 12))
            if "\ufffd" not in text
        )
        length = next(end for end in range(1, 13) if stop in tokenizer.decode(free[:end]))
        (result,) = self.generate(tiny_model, [request(prompt, temperature=0.0, stop=("never", stop))])
        assert result.token_ids.tolist() == free[:length]
        assert result.finish_reason == "stop"

    def test_the_context_ends_a_response_and_a_prompt_without_room_is_an_error(self, tiny_model: Path) -> None:
        prompt = [10 + number % 90 for number in range(510)]
        (result,) = self.generate(tiny_model, [request(prompt, max_new_tokens=50)])
        assert (len(result.token_ids), result.finish_reason) == (2, "length")
        with pytest.raises(DataError, match=r"asked by a test.*512.*512"):
            self.generate(tiny_model, [request([*prompt, 5, 6])])

    def test_a_bad_request_is_an_error_that_names_it_and_leaves_its_neighbours_alone(self, tiny_model: Path) -> None:
        async def use(engine: RolloutEngine) -> list[GenerationResult | BaseException]:
            bad = [request([]), request([5], max_new_tokens=0), request([5], top_p=0.0), request([9] * 600)]
            requests = [request(PROMPTS[0]), *bad, request(PROMPTS[1])]
            return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

        first, *bad, last = self.run(tiny_model, use)
        for error in bad:
            assert isinstance(error, DataError)
            assert "asked by a test" in str(error)
        assert isinstance(first, GenerationResult)
        assert isinstance(last, GenerationResult)

    def test_nothing_is_generated_during_a_pause_and_requests_go_on_afterwards(self, tiny_model: Path) -> None:
        async def use(engine: RolloutEngine) -> tuple[bool, GenerationResult]:
            await engine.pause()
            waiting = asyncio.ensure_future(engine.generate(request(PROMPTS[0], temperature=0.0)))
            done, _ = await asyncio.wait({waiting}, timeout=0.2)
            await engine.resume()
            return bool(done), await waiting

        finished_early, result = self.run(tiny_model, use)
        assert not finished_early
        assert result.token_ids.tolist() == greedy(tiny_model, PROMPTS[0], 12)

    def test_closing_fails_requests_in_flight_and_later_ones(self, tiny_model: Path) -> None:
        async def use(engine: RolloutEngine) -> list[GenerationResult | BaseException]:
            await engine.pause()
            waiting = [asyncio.ensure_future(engine.generate(request(prompt))) for prompt in PROMPTS]
            await asyncio.sleep(0.05)
            await engine.close()
            late = asyncio.ensure_future(engine.generate(request(PROMPTS[0])))
            return await asyncio.gather(*waiting, late, return_exceptions=True)

        for outcome in self.run(tiny_model, use):
            assert isinstance(outcome, RunFailedError)
            assert "asked by a test" in str(outcome)

    def test_closing_leaves_no_thread_and_may_be_repeated(self, tiny_model: Path) -> None:
        before = set(threading.enumerate())

        async def use(engine: RolloutEngine) -> None:
            await engine.generate(request(PROMPTS[0]))
            await engine.close()

        self.run(tiny_model, use)
        left = set(threading.enumerate()) - before
        for thread in left:
            thread.join(10)
        assert not [thread for thread in left if thread.is_alive()]

    def generate(self, model: Path, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        return self.run(model, lambda engine: all_of(engine, requests))


async def all_of(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Return the results of concurrent requests."""
    return list(await asyncio.gather(*map(engine.generate, requests)))


def request(
    prompt: Sequence[int], *, seed: int = 1, name: str = "asked by a test", **sampling: Any
) -> GenerationRequest:
    """Return a request with these fields of `Sampling`. By default it asks for at most 12 tokens."""
    return GenerationRequest(prompt, Sampling(**{"max_new_tokens": 12, **sampling}), seed, name)


def model_logprobs(
    model: Path,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float,
    support: NDArray[np.int32] | None = None,
) -> NDArray[np.float32]:
    """Return the logprob of each response token, from one forward pass over prompt and response.

    With `support`, the distribution of each token is renormalised over its ids.
    """
    everything = _all_logprobs(model, prompt, response, temperature)
    found = everything[np.arange(len(response)), response]
    if support is None:
        return found
    kept = np.take_along_axis(everything, support.clip(0), axis=1)
    return found - np.log(np.where(support >= 0, np.exp(kept), 0).sum(1))


def _all_logprobs(
    model: Path, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> NDArray[np.float32]:
    tokens = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = _load(model)(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).numpy()


def greedy(model: Path, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the likeliest tokens, computed without a cache, up to the end token."""
    causal = _load(model)
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + max_new_tokens:
            tokens.append(int(causal(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            if tokens[-1] == causal.config.eos_token_id:
                break
    return tokens[len(prompt) :]


@cache
def _load(model: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
