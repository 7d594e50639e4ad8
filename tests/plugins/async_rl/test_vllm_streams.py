"""Tokens of vLLM's messages, through all of its client code: in chunks they are what they are one by one."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline_async_rl.engines.commands import BeginUpdate, FinishUpdate
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.response import Delta, Progress
from spurline_async_rl.engines.vllm.engine import VllmMember
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_text.testing.inputs import tiny_tokenizer

pytest.importorskip("vllm")
from recorded_vllm import RecordedEngine, step_output
from vllm.v1.engine.exceptions import EngineDeadError

TOKENIZER = tiny_tokenizer()
LIMIT_S = 60.0
PROMPT = [40, 41]


@dataclass
class Asked:
    """One request, and what it must get, noted token by token as messages are made."""

    name: str
    stop: tuple[str, ...] = ()
    width: int = 0
    progress: Progress = field(default_factory=Progress)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    support: list[int] = field(default_factory=list)
    reason: str | None = None
    writing: Any = None

    def check(self) -> None:
        found = self.progress
        assert found.token_ids.tolist() == self.tokens
        assert found.logprobs.tobytes() == np.array(self.logprobs, np.float32).tobytes()
        assert found.versions.tolist() == self.versions
        assert found.support.tolist() == self.support
        experts = found.experts.since(0)
        assert ([] if experts is None else experts[:, 0, 0].tolist()) == self.experts


class Schedule:
    """An engine whose messages a test writes."""

    def __init__(self, num_requests: int, *, stop: tuple[str, ...] = (), width: int = 0, **options: Any) -> None:
        """width: `support_width` of every second request. vLLM tells the likeliest tokens of all requests of a step."""
        self.engine: Any = RecordedEngine(**options)
        self.core = self.engine.core
        self.member = VllmMember("engine 0", self.engine, TOKENIZER)
        self.version = 0
        self.asked = [Asked(f"request {number}", stop, number % 2 * width) for number in range(num_requests)]
        self._columns = width and width + 1
        self._count = 0

    async def begin(self) -> None:
        for asked in self.asked:
            sampling = Sampling(max_new_tokens=10_000, stop=asked.stop, support_width=asked.width)
            request = GenerationRequest(PROMPT, sampling, 0, asked.name)
            asked.writing = asyncio.ensure_future(self.member.generate(request, asked.progress))
        while len(self.core.requests) < len(self.asked):
            await asyncio.sleep(0)

    def step(self, gives: dict[int, int], ends: dict[int, str], *, with_experts: bool = False) -> None:
        """One message. gives: numbers of tokens by request, of which those in `ends` end."""
        outputs = []
        for number, count in gives.items():
            asked = self.asked[number]
            tokens = [60 + (self._count + index) % 100 for index in range(count)]
            logprobs = [-1 / (3 + self._count + index) for index in range(count)]
            # Some tokens were sampled among more than the request's result has room for.
            sizes = [1 + (index + self._count) % (self._columns + 1) for index in range(count)]
            kept = [range(token, token + size) for token, size in zip(tokens, sizes, strict=True)]
            self._count += count
            more: dict[str, Any] = {"kept": kept, "columns": self._columns}
            if with_experts:
                # vLLM tells those of the prompt with the first token.
                new = list(range(len(asked.experts), len(asked.experts) + count + (0 if asked.tokens else 1)))
                more["routed_experts"] = np.array(new, np.uint8).reshape(-1, 1, 1).repeat(2, axis=2)
            if asked.reason is None and not asked.writing.done():
                asked.tokens += tokens
                asked.logprobs += logprobs
                asked.versions += [self.version] * count
                for each in kept if asked.width else ():
                    known = [*each] if len(each) <= asked.width else []
                    asked.support += known + [-1] * (asked.width - len(known))
                asked.experts += new if with_experts else []
                asked.reason = ends.get(number)
            name = self.core.requests[str(number)].request_id
            outputs.append(step_output(name, tokens, logprobs, ends.get(number), **more))
        self.core.receive(self.core.encoded(outputs))

    async def update(self) -> None:
        await self.member.control(BeginUpdate(self.version + 1))
        # Whatever was made before the switch is there before it.
        for asked in self.asked:
            asked.check()
        self.version += 1
        await self.member.control(FinishUpdate(self.version))

    async def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def live(self) -> list[int]:
        return [n for n, asked in enumerate(self.asked) if asked.reason is None and not asked.writing.done()]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_chunks_have_the_tokens_and_all_that_comes_with_them_of_one_by_one_delivery(data: st.DataObject) -> None:
    async def main() -> None:
        chunk_tokens = data.draw(st.sampled_from([1, 3, 6, 16]), "chunk_tokens")
        schedule = Schedule(
            data.draw(st.integers(1, 4), "requests"),
            chunk_tokens=chunk_tokens,
            width=data.draw(st.sampled_from([0, 2, 80]), "support_width"),
            log_stats=data.draw(st.sampled_from([False, False, False, True]), "vLLM counts"),
        )
        with_experts = data.draw(st.booleans(), "experts")
        await schedule.begin()
        for _ in range(data.draw(st.integers(5, 25), "events")):
            if not schedule.live:
                break
            kind = data.draw(st.sampled_from(["step"] * 6 + ["settle", "update", "update", "abort"]))
            if kind == "step":
                live = st.sampled_from(schedule.live)
                gives = {number: data.draw(st.integers(1, 3)) for number in data.draw(st.sets(live, min_size=1))}
                ends = [number for number in gives if data.draw(st.integers(0, 9)) == 0]
                reasons = {number: data.draw(st.sampled_from(["stop", "length"])) for number in ends}
                schedule.step(gives, reasons, with_experts=with_experts)
            elif kind == "settle":
                await schedule.settle()
            elif kind == "update":
                await schedule.update()
            else:
                await schedule.settle()
                if live := schedule.live:
                    number = data.draw(st.sampled_from(live))
                    writing = schedule.asked[number].writing
                    writing.cancel()
                    await asyncio.wait({writing})
                    assert schedule.core.requests[str(number)].request_id in schedule.core.aborted
                    # The engine may have sent more of it by then.
                    schedule.step({number: 1}, {})
        live = schedule.live
        schedule.core.outputs_queue.put_nowait(EngineDeadError())
        for number, asked in enumerate(schedule.asked):
            if number in live:
                with pytest.raises(EngineDiedError):
                    await asked.writing
            elif asked.reason is not None:
                assert await asked.writing == asked.reason
            asked.check()
        assert not schedule.engine._streams._by_request
        assert not schedule.engine._streams._by_internal_id

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_an_update_waits_for_those_that_are_woken_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM wakes so many, and lets others run before it wakes the next."""
    monkeypatch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "1")

    async def main() -> None:
        schedule = Schedule(40, chunk_tokens=100)
        await schedule.begin()
        for _ in range(2):
            schedule.step(dict.fromkeys(range(40), 1), {})
        await schedule.update()
        for asked in schedule.asked:
            asked.writing.cancel()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_response_with_a_stop_text_ends_at_its_token_however_large_chunks_are() -> None:
    async def main() -> None:
        schedule = Schedule(1, stop=(TOKENIZER.decode([62, 63]),), chunk_tokens=100)
        (asked,) = schedule.asked
        await schedule.begin()
        for expected in ([60], [60, 61], [60, 61, 62], [60, 61, 62, 63]):
            schedule.step({0: 1}, {})
            await schedule.settle()
            assert asked.progress.token_ids.tolist() == expected
        assert await asked.writing == "stop"
        assert schedule.core.aborted == [schedule.core.requests["0"].request_id]

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_tokens_do_not_wait_for_the_rest_of_their_chunk_until_the_engine_counts_as_dead() -> None:
    async def main() -> None:
        schedule = Schedule(2, chunk_tokens=100, generate_timeout_s=0.04)
        await schedule.begin()
        for count in (1, 3, 5):
            for _ in range(count):
                schedule.step({0: 1, 1: 1}, {})
            while any(len(asked.progress) < len(asked.tokens) for asked in schedule.asked):
                await asyncio.sleep(0.01)
        for asked in schedule.asked:
            asked.check()
            asked.writing.cancel()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_whoever_waits_is_woken_by_the_first_token_and_then_once_per_chunk() -> None:
    async def main() -> list[int]:
        schedule = Schedule(1, chunk_tokens=4)
        (asked,) = schedule.asked
        seen = []
        await schedule.begin()
        for _ in range(10):
            schedule.step({0: 1}, {})
            await schedule.settle()
            seen.append(len(asked.progress))
        asked.writing.cancel()
        return seen

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == [1, 1, 1, 1, 5, 5, 5, 5, 9, 9]


def test_logprobs_that_come_in_a_frame_of_their_own_are_those_that_were_sent() -> None:
    """As vLLM sends arrays of 256 bytes and more."""

    async def main() -> None:
        schedule = Schedule(2, chunk_tokens=16)
        await schedule.begin()
        schedule.step({0: 200, 1: 1}, {0: "length", 1: "length"})
        for asked in schedule.asked:
            await asked.writing
            asked.check()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.mark.parametrize("tokens", [[], [7], np.array([3, 4], np.int32)])
def test_tokens_of_an_actor_survive_a_message(tokens: Any) -> None:
    experts = np.full((len(tokens), 1, 2), 5, np.int16)
    sent = Delta(tokens, np.full(len(tokens), -1 / 3, np.float32), "stop", experts, 4)
    got = pickle.loads(pickle.dumps(sent))  # noqa: S301 (made here)
    assert (list(got.token_ids), got.logprobs.tobytes()) == (list(tokens), np.asarray(sent.logprobs).tobytes())
    assert (got.finish_reason, got.experts.tolist(), got.experts_start) == ("stop", experts.tolist(), 4)
