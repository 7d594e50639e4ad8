"""One broadcast per bucket: every engine has every weight once, whoever comes, goes or gets stuck on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from listening import listening, reachable
from torch import Tensor
from weight_takers import Weights, weights

from spurline.errors import BucketLostError, RunFailedError
from spurline.protocols.backend import BackendFacts
from spurline.protocols.source import SourceFacts
from spurline_async_rl.engines.configs import ChildProcessEngineConfig, PoolConfig, VllmEngineConfig
from spurline_async_rl.weights import buckets, exchange
from spurline_async_rl.weights.collective import BroadcastReader, CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig
from spurline_async_rl.weights.exchange import ExchangeGroup
from spurline_concurrency.calls import in_thread
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport

LIMIT_S = 20.0
"""Of an exchange that is to succeed."""


class Taker(TakesWeights):
    """An engine that keeps copies of what comes. absent_in: the bucket, from 1, to whose first broadcast it does not
    come. dies: whether it is gone then; always: whether it never comes to that bucket."""

    transports: Sequence[str] = ("collective",)

    def __init__(self, name: str, workers: int = 1, *, absent_in: int = 0, dies: bool = False, always: bool = False):
        self.name = name
        self.readers = [BroadcastReader(worker) for worker in range(workers)]
        self.taken: list[list[str]] = []
        self.weights: list[dict[str, Tensor]] = []
        self.version = -1
        self.is_dead = False
        self._absent_in, self._dies, self._always = absent_in, dies, always

    @property
    def receivers(self) -> Mapping[str, int]:
        return {} if self.is_dead else {self.name: len(self.readers)}

    async def begin_update(self, version: int) -> None:
        self.taken = [[] for _ in self.readers]
        self.weights = [{} for _ in self.readers]

    async def load_bucket(self, bucket: WeightBucket) -> None:
        if self.is_dead:
            return
        if bucket.where["number"][1] == self._absent_in:
            self._absent_in = self._absent_in if self._always else 0
            if self._dies:
                self.is_dead = True
                for reader in self.readers:
                    reader.close()
                return
            raise BucketLostError(f"{self.name} was not there.")
        sent = WeightBucket.from_plain({**bucket.to_plain(), "receiver": self.name})
        answers = await asyncio.gather(*(in_thread(self._take, worker, sent) for worker in range(len(self.readers))))
        for text in filter(None, answers):
            raise BucketLostError(text)

    def _take(self, worker: int, bucket: WeightBucket) -> str | None:
        try:
            weights = self.readers[worker].read(bucket)
        except BucketLostError as error:
            return str(error)
        self.taken[worker] += [name for name, _ in weights]
        self.weights[worker] |= {name: tensor.clone() for name, tensor in weights}
        return None

    async def finish_update(self, version: int) -> None:
        self.version = version
        for reader in self.readers:
            reader.end_update()

    def assert_has(self, expected: Mapping[str, Tensor], version: int) -> None:
        assert self.version == version
        for taken, copies in zip(self.taken, self.weights, strict=True):
            assert taken == list(expected), "every weight once, in order"
            for name, tensor in expected.items():
                assert copies[name].dtype == tensor.dtype
                assert torch.equal(copies[name], tensor), name


def make_sync(bucket_bytes: int = 600, limit_s: float = LIMIT_S, **settings: Any) -> CollectiveSync:
    sync = CollectiveSync(CollectiveSyncConfig(**settings))
    sync.limit_s = limit_s
    sync.max_bucket_bytes = bucket_bytes
    return sync


def publish(sync: CollectiveSync, backend: Any, takers: Sequence[Taker], version: int = 3) -> SyncReport:
    return asyncio.run(sync.publish(version, backend, takers))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the groups that senders have joined."""
    joined: list[str] = []
    original = ExchangeGroup.__init__

    def join(self: ExchangeGroup, meeting: Any, rank: int) -> None:
        if rank == 0:
            joined.append(meeting.name)
        original(self, meeting, rank)

    monkeypatch.setattr(ExchangeGroup, "__init__", join)
    return joined


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20])
def test_weights_arrive_bit_for_bit_at_every_worker_again_and_again(bucket_bytes: int, groups: list[str]) -> None:
    sync = make_sync(bucket_bytes)
    takers = [Taker("engine 0"), Taker("engine 1", workers=2)]
    try:
        for version, sign in ((1, 1.0), (2, -1.0)):
            expected = weights(sign)
            report = publish(sync, Weights(expected), takers, version)
            for taker in takers:
                taker.assert_has(expected, version)
            assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())
        assert len(groups) == 1, "a group serves as long as its members do"
    finally:
        sync.close()


def test_weights_come_in_the_dtype_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taker, "weights_dtype", "bfloat16")
    sync, taker = make_sync(), Taker("engine 0")
    try:
        report = publish(sync, Weights(weights()), [taker])
    finally:
        sync.close()
    expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in weights().items()}
    taker.assert_has(expected, 3)
    assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())


def test_an_engine_that_comes_later_gets_a_group_of_its_own_and_then_belongs_to_all(groups: list[str]) -> None:
    sync = make_sync()
    first, second, late = Taker("engine 0"), Taker("engine 1"), Taker("engine 2")
    try:
        publish(sync, Weights(weights()), [first, second], 1)
        publish(sync, Weights(weights()), [late], 1)
        assert first.version == 1
        publish(sync, Weights(weights(-1.0)), [first, second, late], 2)
    finally:
        sync.close()
    for taker in (first, second, late):
        taker.assert_has(weights(-1.0), 2)
    assert len(groups) == 3


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket may be lost as often as a busy machine lets a short limit pass before all have joined."""
    monkeypatch.setattr(buckets, "_MOST_LOSSES", 1000)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("absent_in", [1, 2])
def test_what_is_lost_is_sent_again_to_those_that_are_left_and_taken_once(dies: bool, absent_in: int) -> None:
    sync = make_sync(limit_s=2.0)
    steady, shaky = Taker("engine 0", workers=2), Taker("engine 1", absent_in=absent_in, dies=dies)
    try:
        report = publish(sync, Weights(weights()), [steady, shaky])
        steady.assert_has(weights(), 3)
        if not dies:
            shaky.assert_has(weights(), 3)
        assert report.bytes_sent == sum(tensor.nbytes for tensor in weights().values())
        back = Taker("engine 1 again")
        publish(sync, Weights(weights()), [back])
        back.assert_has(weights(), 3)
    finally:
        sync.close()


def test_a_bucket_that_is_lost_again_and_again_ends_the_publish_and_names_who_did_not_come() -> None:
    sync = make_sync(limit_s=1.0)
    takers = [Taker("engine 0"), Taker("engine 7 (process 12)", absent_in=2, always=True)]
    try:
        with pytest.raises(RunFailedError, match=r"version 3 over collective: bucket 2 was lost 4 times\. .*engine 7"):
            publish(sync, Weights(weights()), takers)
        assert takers[0].version == -1
    finally:
        sync.close()


def test_nobody_left_to_receive_is_no_failure_of_a_publish() -> None:
    sync, gone = make_sync(), Taker("engine 0")
    gone.is_dead = True
    try:
        assert publish(sync, Weights(weights()), [gone]).bytes_sent
    finally:
        sync.close()


def test_the_next_bucket_is_made_while_engines_take_the_last_one() -> None:
    made = threading.Event()

    class Waiting(Taker):
        async def load_bucket(self, bucket: WeightBucket) -> None:
            if bucket.where["number"][1] == 1:
                # The broadcast has to end before its buffer is used again; what comes next can be asked for.
                await super().load_bucket(bucket)
                assert await in_thread(made.wait, 10), "the next bucket is made only when this one has been taken"
                return
            await super().load_bucket(bucket)

    class Noting(Weights):
        def named_weights(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in super().named_weights():
                if name == "large":
                    made.set()
                yield name, tensor

    sync, taker = make_sync(1 << 10), Waiting("engine 0")
    try:
        publish(sync, Noting(weights()), [taker])
    finally:
        sync.close()
    taker.assert_has(weights(), 3)


def test_who_waits_for_a_member_that_never_comes_is_told_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_LOOK_S", 0.01)

    class Waiting(Taker):
        async def load_bucket(self, bucket: WeightBucket) -> None:
            await asyncio.Event().wait()

    sync = make_sync(limit_s=0.5, timeout_s=3.0)
    takers = [Taker("engine 0"), Waiting("engine 1", workers=2)]
    waited = "It waited for engine 0, engine 1 to load bucket 1"
    try:
        with pytest.raises(RunFailedError, match=f"version 3 over collective did not end within 3 s. {waited}"):
            publish(sync, Weights(weights()), takers)
    finally:
        sync.close()
    sync = make_sync(limit_s=0.5)
    sync.prepare({"engine 0": 1, "engine 1": 2}, is_lost=False)
    backend: Any = Weights(weights())
    sent = {**next(sync.make_buckets(1, backend)).to_plain(), "receiver": "engine 0"}
    with pytest.raises(BucketLostError, match=r"worker 0 of engine 1, worker 1 of engine 1 did not join within 0\.5 s"):
        BroadcastReader().read(WeightBucket.from_plain(sent))
    sync.close()


@pytest.mark.timeout(120)
def test_an_engine_that_is_gone_before_it_joins_or_in_a_broadcast_is_not_waited_for_until_the_limit() -> None:
    # Shorter than one exchange may take: whoever waits for that limit fails.
    sync = make_sync(limit_s=300.0, timeout_s=30.0)
    for absent_in in (1, 2):
        steady, gone = Taker("engine 0", workers=2), Taker(f"engine {absent_in}", absent_in=absent_in, dies=True)
        publish(sync, Weights(weights()), [steady, gone])
        steady.assert_has(weights(), 3)
    sync.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.timeout(360)
def test_a_sender_that_does_not_come_back_from_a_broadcast_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original, is_over = ExchangeGroup.broadcast, threading.Event()
    stuck: list[str] = []

    def hanging(self: ExchangeGroup, buffer: Tensor) -> None:
        if self._rank == 0 and not stuck:
            stuck.append("the sender")
            is_over.wait(300)
        original(self, buffer)

    monkeypatch.setattr(ExchangeGroup, "broadcast", hanging)
    # Where it hangs, the engine finds out by its own limit and the sender by one that is longer.
    sync, taker = make_sync(limit_s=1.0, timeout_s=300.0), Taker("engine 0")
    try:
        publish(sync, Weights(weights()), [taker])
        taker.assert_has(weights(), 3)
        assert stuck
    finally:
        is_over.set()
        sync.close()


def test_weights_of_a_run_on_one_machine_are_reached_from_it_alone() -> None:
    sync = make_sync()
    before = listening([psutil.Process()])
    try:
        publish(sync, Weights(weights()), [Taker("engine 0", 2)])
        heard = listening([psutil.Process()]) - before
        assert len(heard) >= 2, "the store, and where the members of the group reach each other"
        assert reachable(heard) == []
    finally:
        sync.close()


def test_an_address_of_no_machine_is_an_error_that_names_the_setting() -> None:
    sync = make_sync(limit_s=0.5, address="nowhere.invalid")
    try:
        with pytest.raises(RunFailedError, match=r"nowhere\.invalid within 0\.5 s.*source\.weight_sync\.address"):
            publish(sync, Weights(weights()), [Taker("engine 0")])
    finally:
        sync.close()


def run_with(engine: PoolConfig, transport: str | None = "collective", *, on_cpu: bool = False) -> Any:
    backend_facts = BackendFacts(stays_on_cpu=on_cpu, yields_device=True)
    backend = SimpleNamespace(name="local", rank_request=lambda: None, facts=backend_facts)
    facts = SourceFacts(without_critic=None, transport=transport, update_limit_s=engine.update_limit_s)
    return SimpleNamespace(backend=backend, source=SimpleNamespace(facts=facts))


def test_an_exchange_ends_before_the_engines_that_wait_in_it_are_ended() -> None:
    run = run_with(ChildProcessEngineConfig(update_timeout_s=30), on_cpu=True)
    assert CollectiveSync(CollectiveSyncConfig(), run).limit_s == 15


@pytest.mark.parametrize("engine", [ChildProcessEngineConfig(), VllmEngineConfig()])
def test_engines_on_the_gpu_of_a_backend_in_this_process_are_refused_a_group_with_it(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spurline_async_rl.engines.configs.num_gpus", lambda: 1)
    [problem] = engine.problems(run_with(engine))
    assert problem.key == "placement"
    assert "on a GPU that backend 'local' uses" in problem.message
    assert "shared_memory" in problem.message
    assert list(engine.problems(run_with(engine, on_cpu=True))) == []
    assert list(engine.problems(run_with(engine, None))) == []
    monkeypatch.setattr("spurline_async_rl.engines.configs.num_gpus", lambda: 0)
    assert list(engine.problems(run_with(engine))) == []
