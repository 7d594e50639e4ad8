"""Source `async_rollouts`: generate groups while the model trains, and limit the age of their tokens.

There are two threads. The Producer generates on an event loop. The training thread takes batches from it, and publishes
the weights after an update. The scheduler alone decides which group may start and which batch is ready. Colocated
engines have the devices only while the training thread waits for attempts.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline.progress import waiting
from spurline.protocols.backend import Backend
from spurline.protocols.source import SourceContext
from spurline_async_rl.engines.commands import ControlledEngine
from spurline_async_rl.proof.proof import ProofSettings, PublishProof, note_worst
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits
from spurline_async_rl.source.colocation import Colocation
from spurline_async_rl.source.configs import AsyncRolloutsConfig
from spurline_async_rl.source.loop_thread import LoopThread, QuietCollector
from spurline_async_rl.source.mismatch import MismatchByEngine
from spurline_async_rl.source.producer import Producer
from spurline_async_rl.source.publishing import Publisher, choose_sync
from spurline_async_rl.source.recordings import RECORDED_GROUPS, groups_state, record_groups
from spurline_async_rl.source.staleness import mask_over_age, staleness_metrics
from spurline_async_rl.source.watchdog import ObservedEngine, Watchdog, stall_report
from spurline_async_rl.timeline.records import TIMELINE_FILE, Timeline
from spurline_async_rl.weights.buckets import weights_on_gpu
from spurline_models.abilities import YieldsDevice
from spurline_models.architecture import load_model_config
from spurline_models.lengths import position_limit
from spurline_rl.draws import Draw
from spurline_rl.evaluation_configs import HeldOutConfig
from spurline_rl.group_runner import Outcome
from spurline_rl.prompt_source import Collected, PromptSource
from spurline_rl.protocols.environment import Environment
from spurline_rl.protocols.rollout_engine import RolloutEngine, TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport
from spurline_rl.trajectory import Turn

_CLOSE_TIMEOUT_S = 120.0
_BLOCKED_AFTER_S = 5.0
"""If the event loop does not answer within these seconds at the end of a run, it counts as blocked."""


class AsyncRolloutSource(PromptSource):
    """A source of groups that are generated while the model trains."""

    generates_with_copies = True
    records = (*PromptSource.records, TIMELINE_FILE, RECORDED_GROUPS)

    def __init__(self, config: AsyncRolloutsConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._context = context
        self._loop = LoopThread("spurline-rollouts")
        self._collector = QuietCollector(config.groups_at_once * config.samples_per_prompt)
        self._changed = threading.Event()
        self._engine = self._attempts.engine
        self._observed = self._attempts.engine = ObservedEngine(self._engine)
        # Values at the last call of `_load`: the clock, the CPU time of the loop's thread, and the number of tokens.
        self._looked = (0.0, 0.0, 0)
        self._timeline = Timeline(context.config.run_dir / TIMELINE_FILE)
        limits = SchedulerLimits(
            config.max_staleness,
            config.prompts_per_step,
            config.groups_at_once,
            config.order,
            config.draw_limit,
            num_batches=self.total_steps,
            depth=config.depth,
            at_bound=config.at_bound,
        )
        self._producer = Producer(
            self._prompts,
            self._attempts.training,
            Scheduler(limits),
            self._timeline,
            filters=config.zero_variance == "refill",
            notify=self._changed.set,
            ready=self._preparation.ready,
        )
        self._publisher: Publisher | None = None
        self._proof: PublishProof | None = None
        self._proof_state: Mapping[str, Any] | None = None
        self._colocation: Colocation | None = None
        self._mismatch = MismatchByEngine()
        self._updates = 0
        # Metrics of publishes since the last call of `_take_synced`, and of their proofs since the last batch.
        self._synced: dict[str, float] = {}
        self._proven: dict[str, float] = {}
        self._taken_at = time.perf_counter()
        self._has_resumed = False

    def summary(self) -> Mapping[str, object]:
        facts = super().summary()
        objective = cast("list[str]", facts["objective"])
        return {**facts, "objective": [*objective, *self._config.describe_bound()]}

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise ConfigError if no transport of weights fits the engine."""
        config = cast("AsyncRolloutsConfig", self._settings)
        choose_sync(config.weight_sync, engine, self._context.host.registry, weights_on_gpu(self._context.config))

    def start(self, step: int, backend: Backend) -> None:
        """Start the engines, publish the weights, and begin to generate. Raises ConfigError as `check_engine` does."""
        super().start(step, backend)
        self._updates = step - 1
        self._timeline.resume(self._updates)
        self._proof = self._make_proof() if self._config.proof.every else None
        # The measured difference between logprobs of engine and trainer holds only for the same settings of the engine.
        state = self._proof_state
        if self._proof is not None and state and state["engine"] == self._config.engine.model_dump(mode="json"):
            self._proof.load_state_dict(state)
        self._publisher = Publisher(
            self._engine,
            self._config,
            self._context.config,
            self._context.host.registry,
            self._loop,
            self._timeline,
            self._proof,
            notify=self._changed.set,
        )
        if self._config.engine.is_colocated:
            self._colocation = Colocation(
                cast("ControlledEngine", self._engine),
                cast("YieldsDevice", backend),
                self._publisher,
                self._loop,
                offloads_trainer=self._config.engine.offloads_trainer,
                watchdog_s=self._config.watchdog_s,
            )
        engine = self._config.engine
        limit = "" if engine.start_limit_s is None else f"limit source.engine.start_timeout_s {engine.start_limit_s:g}"
        with waiting(self._context.progress, f"starting rollout engine '{engine.name}'", limit):
            if self._colocation is not None:
                self._colocation.start()
            else:
                self._publisher.start_engines()
                self._advance()
        self._collector.start()
        if self._colocation is None:
            self._loop.call(self._producer.start)
        self._loop.call(self._load)
        self._taken_at = time.perf_counter()
        self._has_resumed = step > 1

    def build(self, step: int) -> TrainingBatch:
        begin = time.perf_counter()
        self._collector.step()
        self._timeline.began("wait")
        # The engines need not keep these weights, because they get new ones after the update.
        with self._engines_turn(keep_weights=False):
            if self._colocation is not None:
                # The engines have new weights, so more groups may start.
                self._loop.call(self._producer.publish, self._updates)
                self._loop.call(self._producer.start)
            collected, retries = self._wait_for_groups(step)
        self._timeline.ended("wait")
        self._timeline.began("train")
        waited = time.perf_counter() - begin
        generating, self._taken_at = time.perf_counter() - self._taken_at, time.perf_counter()
        if self._has_resumed:
            # Another process may have generated these groups, in an unknown time.
            generating, self._has_resumed = 0.0, False
        masked = 0
        if self._config.at_bound == "mask":
            groups, masked = mask_over_age(collected.groups, self._updates, self._config.max_staleness)
            collected = replace(collected, groups=tuple(groups))
        if self._config.record_groups:
            record_groups(self._context.config.run_dir, step, collected.groups)
        ages = staleness_metrics(collected.groups, self._updates, self._config.max_staleness, masked)
        measured = {
            **self._loop.call(self._levels),
            "time/wait_rollouts": waited,
            "time/generating": generating,
            **self._take_synced(),
        }
        batch, columns = self._batch(step, collected, self._backend, retries=retries, seconds=waited)
        ages |= self._mismatch.add(collected.groups, columns.flatten(batch.tokens["old_logprobs"]), self._updates)
        # The answers to the last probes must be judged before the update, which changes the weights of the trainer.
        self._settle_proof()
        proven, self._proven = self._proven, {}
        return replace(batch, info={**batch.info, **ages, **measured, **proven})

    def _levels(self) -> dict[str, float]:
        """Return metrics of the groups and of the loop. This is called on the loop."""
        scheduler = self._producer.scheduler
        proven = {"async/given_back": float(self._producer.take_given_back())} if self._config.proof.every else {}
        return {
            **proven,
            "async/running": float(scheduler.num_running),
            "async/buffered": float(scheduler.num_buffered),
            "async/depth": scheduler.depth.value,
            **self._load(),
        }

    def _load(self) -> dict[str, float]:
        """Return the load of the loop since the last call.

        `controller/cpu_share` is the CPU time per second of the loop's thread. If it is near 1, the thread limits the
        speed of generation, because all tokens come through the loop.
        """
        began, cpu_s, tokens = self._looked
        self._looked = now, now_cpu_s, now_tokens = time.perf_counter(), time.thread_time(), self._observed.num_tokens
        seconds = max(1e-9, now - began)
        return {
            "controller/cpu_share": (now_cpu_s - cpu_s) / seconds,
            "controller/tokens_per_s": (now_tokens - tokens) / seconds,
        }

    def epoch(self, step: int) -> float:
        # `spurline plan` calls this before any prompt has been drawn.
        done = self._producer.scheduler.num_ended or step * self._config.prompts_per_step
        return done / self._prompts.prompts_per_epoch

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Publish the weights if a publish is due. Colocated engines get the weights at their next turn."""
        self._timeline.ended("train")
        self._updates = step
        if self._colocation is None and step % self._config.publish_every == 0 and step < self.total_steps:
            self._note_synced(self._advance())
        self._timeline.write(step)
        return {} if self._colocation is not None else self._take_synced()

    def make_attempts(
        self, prompts: Sequence[Draw], held_out: HeldOutConfig, environment: Environment | None = None
    ) -> Sequence[Outcome]:
        """Make held-out attempts with the newest weights, while attempts for training go on."""
        if self._colocation is None and self._producer.scheduler.version < self._updates:
            self._advance()
        self._settle_proof()
        # On colocated engines no more groups start, because the end of the evaluation would interrupt them.
        with self._engines_turn(keep_weights=True):
            outcomes = [*self._evaluate(prompts, held_out, environment)]
            # An engine that was started again may have answered before its proof failed.
            while again := self._loop.call(self._producer.tainted, outcomes):
                repeated = self._evaluate([prompts[index] for index in again], held_out, environment)
                for index, outcome in zip(again, repeated, strict=True):
                    outcomes[index] = outcome
        return outcomes

    def _evaluate(
        self, prompts: Sequence[Draw], held_out: HeldOutConfig, environment: Environment | None
    ) -> Sequence[Outcome]:
        self._timeline.began("evaluate")
        evaluating = self._loop.start(self._attempts.evaluate(prompts, held_out, environment))
        evaluating.add_done_callback(lambda _: self._changed.set())
        head = "The evaluation waits for held-out attempts. No request was answered for {:.0f} s."
        watchdog = self._watchdog(lambda waited_s: "\n  ".join([head.format(waited_s), *self._observed.describe()]))
        try:
            while not evaluating.done():
                self._changed.clear()
                self._serve_restarted_engines()
                if not evaluating.done():
                    watchdog.wait(self._changed)
        finally:
            evaluating.cancel()
        self._timeline.ended("evaluate")
        return evaluating.result()

    def state_dict(self) -> dict[str, object]:
        # A checkpoint must not hold groups of an engine that is about to be rejected.
        self._settle_proof(for_checkpoint=True)
        prompts, (state, groups) = self._loop.call(lambda: (self._prompts_state(), self._producer.snapshot()))
        engine = self._config.engine.model_dump(mode="json")
        proof = None if self._proof is None else {**self._proof.state_dict(), "engine": engine}
        terms = self._config.group_terms()
        return {**prompts, **state, "groups": groups_state(groups), "made_with": terms, "proof": proof}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._load_prompts_state(state)
        self._proof_state = cast("Mapping[str, Any] | None", state.get("proof"))
        terms = cast("Mapping[str, Any]", state.get("made_with", self._config.group_terms()))
        self._producer.load_state_dict(state, keep_groups=self._config.may_train_on(terms))

    def close(self) -> None:
        """End generation, engines and threads. Errors while closing never hide the error that ended the run."""
        self._collector.close()
        ended_by = failure = sys.exception()
        if not self._loop.responds(_BLOCKED_AFTER_S):
            # A blocked loop cannot close the engines, but they end when this process ends.
            steps = (self._end_transport, super().close)
        else:
            steps = (self._end_generation, self._end_transport, self._loop.close, super().close)
        for end in steps:
            try:
                end()
            except Exception as error:  # noqa: BLE001 - raised after the other steps
                if failure is None:
                    failure = error
                else:
                    failure.add_note(f"Ending the rollouts failed too: {error}")
        if failure is not None and ended_by is None:
            raise failure

    def _end_generation(self) -> None:
        async def end() -> None:
            try:
                await self._producer.close()
            finally:
                await self._attempts.close()

        self._loop.run(end(), _CLOSE_TIMEOUT_S, "Ending the rollouts")

    def _end_transport(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _wait_for_groups(self, step: int) -> tuple[Collected, int]:
        """Return the groups of this step, and the number of their retries."""
        watchdog = self._watchdog(partial(stall_report, self._producer, self._observed, self._proof, step))
        while True:
            self._changed.clear()
            unproven = self._unproven_version()
            seconds = time.perf_counter() - self._taken_at
            taken = watchdog.result(self._loop.submit(self._producer.take, step, seconds, unproven))
            if taken is not None:
                return taken
            self._serve_restarted_engines()
            watchdog.wait(self._changed)

    def _unproven_version(self) -> int | None:
        """Return the oldest version that is not proven, whose tokens must not be taken yet, or None.

        If the engines have answered a probe, their answers are judged first. For colocated engines the result is None,
        since they are judged after their turn, and the run ends if one is rejected.
        """
        if self._proof is None or self._colocation is not None:
            return None
        if self._proof.is_answered:
            self._settle_proof()
        return self._proof.unproven

    def _serve_restarted_engines(self) -> None:
        assert self._publisher is not None, "not started"
        awaiting = cast("TakesWeights", self._engine).awaiting_weights
        if awaiting and self._colocation is not None:
            self._colocation.serve(self._updates, awaiting)
        elif awaiting:
            self._publisher.publish(self._updates, self._backend, awaiting)
            self._settle_proof()

    def _watchdog(self, describe: Callable[[float], str]) -> Watchdog:
        return Watchdog(self._config, self._loop, self._observed, describe)

    @contextmanager
    def _engines_turn(self, *, keep_weights: bool) -> Generator[None]:
        """Let colocated engines generate within this context, with the current weights; see `Colocation.take_back`."""
        if self._colocation is None:
            yield
            return
        is_update = self._updates > self._producer.scheduler.version
        report = self._colocation.give(self._updates)
        if report is not None:
            self._note_synced(report, is_update=is_update)
        yield
        if self._proof is not None:
            self._proof.await_answers()
        self._colocation.take_back(keep_weights=keep_weights)
        # The trainer has its device again, so it can judge the answers of this turn.
        self._settle_proof()

    def _note_synced(self, report: SyncReport, *, is_update: bool = True) -> None:
        """Note a publish. `is_update` is true if the engines had older weights before."""
        if is_update:
            self._hooks.on_weights_synced(step=self._updates, report=report)
        seen = self._synced
        new = {"time/sync": report.transfer_s, "time/sync_pause": report.pause_s, "sync/bytes": report.bytes_sent}
        self._synced = {**seen, **{name: seen.get(name, 0.0) + value for name, value in new.items()}}

    def _take_synced(self) -> dict[str, float]:
        synced, self._synced = self._synced, {}
        return synced if self._colocation is None else {**synced, **self._colocation.take_seconds()}

    def _advance(self) -> SyncReport:
        """Publish the current weights, and let more groups start."""
        assert self._publisher is not None, "not started"
        report = self._publisher.publish(self._updates, self._backend)
        if self._config.max_staleness == 0:
            # Groups start only after the probes are answered, so probes cannot change the rounding of other requests.
            self._settle_proof()
        self._loop.call(self._producer.publish, self._updates)
        return report

    def _settle_proof(self, *, for_checkpoint: bool = False) -> None:
        """Judge the answers to the last probes, and note the metrics."""
        began = time.perf_counter()
        if self._proof is None or not (found := self._proof.settle(self._score, for_checkpoint=for_checkpoint)):
            return
        note_worst(self._proven, found)
        self._proven["time/proof"] = self._proven.get("time/proof", 0.0) + time.perf_counter() - began

    def _score(self, turns: Sequence[Turn]) -> Sequence[NDArray[np.float32]]:
        return self._preparation.logprobs_of(turns, self._backend)

    def _make_proof(self) -> PublishProof:
        config = self._config
        model = load_model_config(self._context.config.model)
        limit = position_limit(model)
        # The trainer needs the probe in one row.
        rows = self._context.config.collator.row_capacity
        limits = (config.engine.context_tokens, rows, None if limit is None else limit.tokens)
        settings = ProofSettings(
            config.proof,
            temperature=config.sampling.temperature,
            context=min((limit for limit in limits if limit is not None), default=None),
            vocabulary=getattr(model.get_text_config(), "vocab_size", None),
            in_fp32=self._context.config.backend.facts.computes_in != "bf16",
            crosses=config.engine.recomputes_cache,
            restarts=not config.engine.is_colocated,
            timeout_s=config.stall_timeout_s,
            report_s=config.watchdog_s,
        )
        engine, tokenizer = cast("TakesWeights", self._engine), self._context.tokenizer
        return PublishProof(engine, settings, tokenizer, self._loop, self._producer, notify=self._changed.set)
