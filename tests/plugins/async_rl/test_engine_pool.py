"""The pool of engines: nothing is lost or written twice, whoever dies and whenever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_members import ScriptedMember, Trainer, World, reference
from virtual_loop import run_virtually

from spurline.errors import ModelError, RunFailedError
from spurline_async_rl.engines import member as member_module
from spurline_async_rl.engines import pool as pool_module
from spurline_async_rl.engines.commands import BeginUpdate, FinishUpdate, LoadBucket, Pause, Resume, Wake, from_plain
from spurline_async_rl.engines.configs import PoolConfig
from spurline_async_rl.engines.member import EngineDiedError, PooledEngine
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.response import Progress
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig
from spurline_models.weight_buckets import TensorPlace, WeightBucket
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling, TakesWeights
from spurline_rl.trajectory import FinishReason

Result = TypeVar("Result")


def asked(number: int, max_new_tokens: int = 30, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        [10 + number % 50, 11],
        Sampling(max_new_tokens=max_new_tokens, **sampling),
        number,
        f"train:{number}@0 sample 0",
    )


def use(
    pool_of: Callable[[], EnginePool],
    body: Callable[[EnginePool, Trainer], Awaitable[Result]],
    *,
    first: int | None = 0,
) -> Result:
    """What `body` does with a pool whose trainer serves engines; `first` is published before, unless it is None."""

    async def main() -> Result:
        pool = pool_of()
        trainer = Trainer(pool)
        serving = asyncio.create_task(trainer.serve())
        try:
            async with asyncio.timeout(30):
                if first is not None:
                    await trainer.publish(version=first)
                return await body(pool, trainer)
        finally:
            await pool.close()
            serving.cancel()
            with suppress(asyncio.CancelledError, RunFailedError):
                await serving

    return asyncio.run(main())


def check(request: GenerationRequest, result: GenerationResult) -> None:
    """The response of an engine that never dies, with versions that only rise."""
    tokens, reason = reference(request)
    assert (result.token_ids.tolist(), result.finish_reason) == (tokens, reason)
    assert result.logprobs.tolist() == [-float(token) for token in tokens]
    assert len(result.versions) == len(tokens)
    assert (np.diff(result.versions) >= 0).all()


HOW = st.sampled_from(["raise before", "raise after", "end before", "end after"])


@settings(max_examples=150)
@given(
    engines=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    deaths=st.dictionaries(st.integers(0, 200), HOW, max_size=8),
    publishes=st.integers(0, 4),
    pauses=st.integers(0, 2),
)
def test_every_request_gets_the_response_of_an_engine_that_never_dies(
    engines: int, lengths: list[int], deaths: dict[int, str], publishes: int, pauses: int
) -> None:
    world = World(deaths)
    requests = [asked(number, length) for number, length in enumerate(lengths)]

    async def body(pool: EnginePool, trainer: Trainer) -> list[GenerationResult]:
        async def disturb() -> None:
            for version in range(1, publishes + 1):
                await trainer.publish(version=version)
            for _ in range(pauses):
                await pool.pause()
                await asyncio.sleep(0)
                await pool.resume()

        disturbing = asyncio.create_task(disturb())
        results = await asyncio.gather(*map(pool.generate, requests))
        await disturbing
        return results

    results = use(lambda: world.pool(engines), body)
    for request, result in zip(requests, results, strict=True):
        check(request, result)
        assert set(result.versions.tolist()) <= set(range(publishes + 1))
    assert all(member.is_closed for member in world.members)


def test_engines_start_with_the_first_use_and_none_generates_before_it_has_weights() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> tuple[list[int], bool, GenerationResult]:
        counts = [len(world.members)]
        waiting = asyncio.ensure_future(pool.generate(asked(1)))
        await pool.start()
        counts += [len(world.members), len(pool.awaiting_weights)]
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        await trainer.publish(version=3)
        return [*counts, len(pool.awaiting_weights)], bool(done), await waiting

    counts, early, result = use(lambda: world.pool(3), body, first=None)
    assert counts == [0, 3, 3, 0]
    assert not early
    assert set(result.versions.tolist()) == {3}


def test_the_first_update_waits_for_every_engine_also_when_requests_came_before_it() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> list[int]:
        waiting = asyncio.ensure_future(pool.generate(asked(1)))
        world.slow_start = asyncio.Event()
        publishing = asyncio.ensure_future(trainer.publish(version=3))
        done, _ = await asyncio.wait({publishing}, timeout=0.05)
        assert not done
        world.slow_start.set()
        await publishing
        await waiting
        return [member.version for member in world.members]

    assert use(lambda: world.pool(3), body, first=None) == [3, 3, 3]


def test_an_engine_that_was_started_anew_awaits_the_current_weights_while_others_go_on() -> None:
    world = World({0: "end before"})

    async def body(pool: EnginePool, trainer: Trainer) -> tuple[GenerationResult, bool, int, list[int]]:
        told = asyncio.Event()
        pool.on_awaiting_weights = told.set
        result = await pool.generate(asked(1))
        await told.wait()
        (waiting,) = pool.awaiting_weights
        await pool.generate(asked(2))
        await trainer.publish(waiting)
        return result, isinstance(waiting, TakesWeights), len(pool.awaiting_weights), [m.version for m in world.members]

    result, takes, left, versions = use(lambda: world.pool(2), body, first=4)
    check(asked(1), result)
    assert takes
    assert left == 0
    assert versions == [4, 4, 4]
    assert world.members[2].served == []


def test_an_engine_that_ends_again_while_it_gets_its_weights_is_waited_for_by_nobody() -> None:
    world = World({0: "end before"})

    async def body(pool: EnginePool, trainer: Trainer) -> dict[str, int]:
        told = asyncio.Event()
        pool.on_awaiting_weights = told.set
        await pool.generate(asked(1))
        await told.wait()
        (waiting,) = pool.awaiting_weights
        assert list(waiting.receivers) == [world.members[2].name]
        world.fail_at["load_bucket"] = lambda member: member is world.members[2]
        # One exchange may take longer than the whole publish, which fails when it waits for the engine that is gone.
        sync = CollectiveSync(CollectiveSyncConfig(timeout_s=20))
        sync.limit_s = 300
        backend: Any = SimpleNamespace(named_weights=lambda: iter([("a", torch.ones(9)), ("b", torch.ones(9))]))
        sync.max_bucket_bytes = 4
        try:
            await sync.publish(4, backend, [waiting])
        finally:
            sync.close()
        return dict(waiting.receivers)

    assert use(lambda: world.pool(2), body, first=4) == {}


@pytest.mark.parametrize("part", ["begin_update", "load_bucket", "finish_update"])
@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_that_fails_or_hangs_in_an_update_is_replaced_and_the_update_goes_on(part: str, hangs: bool) -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> list[GenerationResult]:
        (world.hang_at if hangs else world.fail_at)[part] = lambda member: member is world.members[0]
        await trainer.publish(version=1)
        results = await asyncio.gather(*(pool.generate(asked(number)) for number in range(4)))
        while pool.awaiting_weights or len(world.members) < 3:
            await asyncio.sleep(0)
        return results

    results = use(lambda: world.pool(2, update_timeout_s=0.2), body)
    assert {version for result in results for version in result.versions.tolist()} == {1}
    assert world.members[0].is_closed
    assert [member.version for member in world.members[1:]] == [1, 1]


def test_a_command_survives_the_way_to_another_process() -> None:
    bucket = WeightBucket("disk", (TensorPlace("a", "float32", (2, 3), 64),), {"path": "/x"})
    for command in (Pause(), Resume(), BeginUpdate(3), LoadBucket(bucket), FinishUpdate(4), Wake("cache")):
        assert from_plain(json.loads(json.dumps(command.to_plain()))) == command


def test_an_update_that_no_engine_survives_is_an_error_with_the_reasons() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> None:
        world.fail_at["load_bucket"] = lambda member: True
        with pytest.raises(RunFailedError, match=r"No engine takes.*engine 0.*load bucket.*RuntimeError.*engine 1"):
            await trainer.publish(version=1)

    use(lambda: world.pool(2), body)


def test_a_rejected_engine_is_replaced_and_its_tokens_since_the_last_proof_are_written_again() -> None:
    world = World()
    request = asked(5)
    longest = len(reference(request)[0])

    async def body(pool: EnginePool, trainer: Trainer) -> tuple[GenerationResult, str, int]:
        writing = asyncio.ensure_future(pool.generate(request))
        while world.written < 3:
            await asyncio.sleep(0)
        await trainer.publish(version=1)
        written = world.written
        while world.written < written + 4:
            await asyncio.sleep(0)
        rejected = pool.holder_of(request.name)
        assert rejected is not None
        pool.accept(rejected, 0)
        pool.reject(rejected, "it is late")
        lost = world.written - written
        result = await writing
        while len(world.members) < 3:
            await asyncio.sleep(0)
        return result, rejected, lost

    result, rejected, lost = use(lambda: world.pool(2), body)
    check(request, result)
    assert lost >= 4
    assert world.written >= longest + lost
    first, second = result.engines
    assert (first, second == rejected) == (rejected, False)


def test_an_engine_whose_replacement_is_rejected_too_is_not_replaced_again(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> None:
        pool.reject("engine 0 life 0", "it is late")
        while not any(member.version == 0 for member in world.members[2:]):
            await asyncio.sleep(0)
        with pytest.raises(RunFailedError, match=r"engine 0 life 2 was started again for the same reason.*late"):
            pool.reject("engine 0 life 2", "it is late")
        pool.accept("engine 0 life 2", 0)
        pool.reject("engine 0 life 2", "it is late")

    use(lambda: world.pool(2), body)
    assert capsys.readouterr().err == "", "the caller tells the user"


def test_every_engine_answers_a_probe_and_one_that_crosses_an_update() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> list[Any]:
        answers = await pool.generate_on_each(asked(5))
        pool.crossing = asked(6, max_new_tokens=400)
        await trainer.publish(version=1)
        crossed = await pool.take_crossed(1, 2)
        assert await pool.take_crossed(1, 2) == {}
        return [answers, crossed]

    answers, crossed = use(lambda: world.pool(3), body)
    names = [member.name for member in world.members]
    assert [*answers] == [*crossed] == names
    for name, answer in answers.items():
        check(asked(5), answer)
        assert answer.engines == (name,)
    for answer in crossed.values():
        assert (answer.versions == 1).sum() <= 2
        tokens = answer.token_ids.tolist()
        assert tokens == reference(asked(6, max_new_tokens=len(tokens)))[0]
        assert set(answer.versions.tolist()) == {0, 1} or answer.finish_reason == "stop"


def test_engines_that_all_stand_still_in_an_update_are_replaced_as_dead_ones_are() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> GenerationResult:
        world.hang_at["load_bucket"] = lambda member: member in world.members[:2]
        await trainer.publish(version=1)
        await pool.wait_for_one()
        assert all(member.is_closed for member in world.members[:2])
        while not pool.awaiting_weights:
            await asyncio.sleep(0.01)
        await trainer.publish(version=1)
        return await pool.generate(asked(1))

    result = use(lambda: world.pool(2, update_timeout_s=0.1), body)
    check(asked(1), result)
    assert set(result.versions.tolist()) == {1}


@pytest.mark.parametrize("part", ["begin_update", "load_bucket", "finish_update"])
def test_engines_go_on_with_new_weights_while_another_stands_still_which_gets_them_later(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, goes_on = World(), asyncio.Event()

    async def body(pool: EnginePool, trainer: Trainer) -> None:
        slow = world.members[1]
        world.stand_at[part] = lambda member: goes_on if member is slow else None
        writing = [asyncio.ensure_future(pool.generate(asked(number))) for number in range(8)]
        while not all(member.served for member in world.members):
            await asyncio.sleep(0)
        monkeypatch.setattr(pool_module, "_PATIENCE_S", 0.05)
        for version in (1, 2):
            await trainer.publish(version=version)
        # No request goes to the engine that stands still.
        served = len(slow.served)
        for number in range(8, 16):
            result = await pool.generate(asked(number))
            check(asked(number), result)
            assert set(result.versions.tolist()) == {2}
        assert len(slow.served) == served
        goes_on.set()
        for number, result in enumerate(await asyncio.gather(*writing)):
            check(asked(number), result)
        while pool.awaiting_weights or slow.version < 2:
            assert slow.version == 2 or [engine.name for engine in pool._ready()] == [world.members[0].name]
            await asyncio.sleep(0)

    use(lambda: world.pool(2), body)
    assert not any(member.is_closed for member in world.members[2:])
    assert len(world.members) == 2, "no engine was replaced"
    assert "engine 1 life 1 takes long to" in capsys.readouterr().err


def test_an_engine_without_progress_is_replaced_and_its_requests_go_on_elsewhere() -> None:
    world = World()
    hung: list[ScriptedMember] = []

    async def body(pool: EnginePool, trainer: Trainer) -> GenerationResult:
        writing = asyncio.ensure_future(pool.generate(asked(3)))
        while world.written < 2:
            await asyncio.sleep(0)
        hung.extend(member for member in world.members if member.served)
        world.hang_at["generate"] = lambda member: member in hung
        return await writing

    result = use(lambda: world.pool(2, generate_timeout_s=0.2), body)
    check(asked(3), result)
    assert len(result.token_ids) > 3
    assert hung[0].is_closed


class WritesSlowly(ScriptedMember):
    """Writes its first token at 34 s, and the second 83 s later."""

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        for seconds in (34, 83):
            await asyncio.sleep(seconds)
            progress.add([8], [0.0], 0)
        return "stop"


def test_a_pause_between_two_looks_at_a_request_does_not_count_either() -> None:
    async def main() -> None:
        engine = PooledEngine(
            WritesSlowly("engine 0", World()), PoolConfig(name="scripted", generate_timeout_s=70), (), lambda: None
        )
        life = asyncio.create_task(engine.live())
        writing = asyncio.create_task(engine.generate(asked(0), Progress()))
        # Looks are at 17.5, 35, 52.5 s and so on.
        await asyncio.sleep(36)
        await engine.control(Pause())
        await asyncio.sleep(15)
        await engine.control(Resume())
        assert await writing == "stop"
        engine.kill("it is over")
        await life

    run_virtually(main())


class NeverCloses(ScriptedMember):
    """Neither starts nor ends, as a process that stands still."""

    async def start(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await asyncio.Event().wait()


def test_an_engine_that_has_not_started_is_not_given_the_time_to_end_in_order() -> None:
    async def main() -> tuple[float, float]:
        config = PoolConfig(name="scripted", close_timeout_s=1000)
        engine = PooledEngine(NeverCloses("engine 0", World()), config, (), lambda: None)
        life = asyncio.create_task(engine.live())
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        await engine.close()
        await life
        return asyncio.get_running_loop().time() - began, config.close_timeout_s

    took_s, in_order_s = run_virtually(main())
    assert took_s < in_order_s / 10


def test_an_engine_that_does_not_pause_in_time_is_replaced() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> GenerationResult:
        world.hang_at["pause"] = lambda member: member is world.members[0]
        await pool.pause()
        waiting = asyncio.ensure_future(pool.generate(asked(1)))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        await pool.resume()
        return await waiting

    check(asked(1), use(lambda: world.pool(2, pause_timeout_s=0.1), body))
    assert world.members[0].is_closed


def test_engines_of_which_none_ever_starts_are_not_tried_as_often_as_those_that_die() -> None:
    async def main() -> int:
        world = World()
        world.fail_at["start"] = lambda member: True
        pool = world.pool(2)
        with pytest.raises(RunFailedError, match=r"No engine has started in 3 tries.*cannot start"):
            await pool.start()
        await pool.close()
        return len(world.members)

    assert run_virtually(main()) <= 6


def test_the_run_fails_when_engines_have_died_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(dict.fromkeys(range(200), "raise before"))

    async def body(pool: EnginePool, trainer: Trainer) -> list[Any]:
        return await asyncio.gather(*(pool.generate(asked(number)) for number in range(3)), return_exceptions=True)

    for number, outcome in enumerate(use(lambda: world.pool(2, max_restarts=2), body)):
        assert isinstance(outcome, RunFailedError)
        assert f"train:{number}@0 sample 0: the rollout engines have ended" in str(outcome)
        assert "3 engines have died" in str(outcome)
        assert "max_restarts is 2" in str(outcome)
    assert len(world.members) == 4
    told = capsys.readouterr().err.splitlines()
    assert ["(1 of at most 2, source.engine.max_restarts)" in told[0], "(2 of at most 2" in told[1]] == [True, True]
    assert len(told) == 2


def test_what_the_user_can_mend_is_told_at_once_and_not_tried_again() -> None:
    world = World()

    def refuse(member: ScriptedMember) -> bool:
        raise ModelError("model.path: nothing is there.")

    world.fail_at["start"] = refuse

    async def body(pool: EnginePool, trainer: Trainer) -> None:
        with pytest.raises(RunFailedError, match=r"model\.path: nothing is there"):
            await pool.start()

    use(lambda: world.pool(1), body, first=None)
    assert len(world.members) == 1


def test_closing_fails_who_waits_and_ends_every_engine_also_one_that_is_starting() -> None:
    world = World()
    world.hang_at["start"] = lambda member: True

    async def body(pool: EnginePool, trainer: Trainer) -> list[Any]:
        waiting = [asyncio.ensure_future(pool.generate(asked(number))) for number in range(2)]
        await asyncio.sleep(0.01)
        await pool.close()
        return await asyncio.gather(*waiting, pool.generate(asked(2)), return_exceptions=True)

    for outcome in use(lambda: world.pool(2), body, first=None):
        assert isinstance(outcome, RunFailedError)
        assert "they were closed" in str(outcome)
    assert all(member.is_closed for member in world.members)


class HandsOverLate(ScriptedMember):
    """Adds tokens to the progress only when it is cancelled; may go on then."""

    clings = False

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        progress.add([8], [0.0], self.version)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                # As what a member cancels takes some turns of the loop to end.
                for _ in range(5):
                    await asyncio.sleep(0)
                progress.add([9, 10], [0.0] * 2, self.version)
                if not self.clings:
                    raise
                self.clings = False


@pytest.mark.parametrize("clings", [False, True])
def test_what_a_dead_engine_has_already_given_its_member_is_kept(clings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "_HANDING_OVER_S", 0.05)

    async def main() -> None:
        member = HandsOverLate("engine 0", World())
        member.clings = clings
        engine = PooledEngine(member, PoolConfig(name="scripted"), (), lambda: None)
        life = asyncio.create_task(engine.live())
        progress = Progress()
        asyncio.get_running_loop().call_later(0.01, engine.kill, "it ended")
        with pytest.raises(EngineDiedError, match="it ended"):
            await asyncio.wait_for(engine.generate(asked(0), progress), 5)
        assert progress.token_ids.tolist() == [8, 9, 10]
        await life

    asyncio.run(main())


def test_requests_of_one_prompt_go_to_one_engine_and_prompts_are_spread() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> None:
        requests = [
            GenerationRequest([9], Sampling(max_new_tokens=20), 0, f"train:{prompt}@0 sample {sample} turn 0")
            for sample in range(4)
            for prompt in range(6)
        ]
        await asyncio.gather(*map(pool.generate, requests))
        assert pool.holder_of(requests[0].name) is None

    use(lambda: world.pool(3), body)
    served = [{name.partition(" ")[0] for name in member.served} for member in world.members]
    assert [len(prompts) for prompts in served] == [2, 2, 2]


def test_a_cancelled_request_leaves_the_engine_at_once() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> int:
        request = asked(3)
        writing = asyncio.ensure_future(pool.generate(request))
        while world.written < 2:
            await asyncio.sleep(0)
        assert pool.holder_of(request.name) == world.members[0].name
        writing.cancel()
        await asyncio.wait({writing})
        written = world.written
        await asyncio.sleep(0.02)
        return world.written - written

    assert use(lambda: world.pool(1), body) <= 1


def test_seconds_without_an_engine_are_counted_until_one_is_ready() -> None:
    world = World()

    async def body(pool: EnginePool, trainer: Trainer) -> tuple[float, float, float]:
        await pool.start()
        await asyncio.sleep(0.05)
        before = pool.seconds_down()
        await trainer.publish(version=0)
        ready = pool.seconds_down()
        await asyncio.sleep(0.05)
        return before, ready, pool.seconds_down()

    before, ready, later = use(lambda: world.pool(2), body, first=None)
    assert 0.05 <= before <= ready
    assert later == ready
