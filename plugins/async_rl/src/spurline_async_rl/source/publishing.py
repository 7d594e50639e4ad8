"""Publish weights to the engines. This runs on the event loop, while the training thread waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, listing
from spurline.plugins.registry import Registry
from spurline.protocols.backend import Backend
from spurline_async_rl.proof.proof import PublishProof
from spurline_async_rl.source.configs import AsyncRolloutsConfig
from spurline_async_rl.source.loop_thread import GRACE_S, LoopThread, ends_the_run
from spurline_async_rl.timeline.records import Timeline
from spurline_async_rl.weights.buckets import weights_on_gpu
from spurline_rl.protocols.rollout_engine import RolloutEngine, TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport, WeightSync, WeightSyncConfig


class Publisher:
    """Publishes the weights of one run. Its constructor raises ConfigError as `choose_sync` does.

    `notify` is called on the loop when an engine was started again and awaits weights.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        config: AsyncRolloutsConfig,
        run: RunConfig,
        registry: Registry,
        loop: LoopThread,
        timeline: Timeline,
        proof: PublishProof | None,
        notify: Callable[[], None],
    ) -> None:
        chosen = choose_sync(config.weight_sync, engine, registry, weights_on_gpu(run))
        assert isinstance(engine, TakesWeights)
        self._engine = engine
        self._name = config.engine.name
        self._watchdog_s = config.watchdog_s
        self._loop = loop
        self._timeline = timeline
        self._proof = proof
        self._sync: WeightSync = registry.create("weight_sync", chosen, run=run)
        self._engine.on_awaiting_weights = notify

    def start_engines(self) -> None:
        """Start the engines. This has a time limit of its own, which differs from the limit of a publish."""
        limit = self._engine.longest_start_s + GRACE_S
        self._loop.run(self._engine.start(), limit, f"Starting rollout engine '{self._name}'")

    def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights] | None = None) -> SyncReport:
        """Publish the backend's weights to `engines` (None means all). Return when they generate with these weights.

        Raises:
            RunFailedError: If the publish fails. Nothing may be trained afterwards.
        """
        what = f"Publishing the weights of version {version} over {self._sync.transport}"
        if engines is None:
            waiting = f"Starting a rollout engine '{self._name}' again"
            self._loop.run(self._engine.wait_for_one(), self._engine.longest_start_s + GRACE_S, waiting)
        if self._proof is not None:
            self._proof.before_publish(engines)
        self._timeline.began("publish")
        with ends_the_run(what):
            publishing = self._loop.start(
                self._sync.publish(version, backend, [self._engine] if engines is None else engines)
            )
            limit_s, waits_for = self._sync.timeout_s + GRACE_S, lambda: self._sync.waits_for
            report = self._loop.wait(publishing, limit_s, what, every_s=self._watchdog_s, waits_for=waits_for)
        self._timeline.ended("publish")
        if self._proof is not None:
            self._proof.ask(version, engines)
        return report

    def close(self) -> None:
        self._sync.close()


def choose_sync(
    given: WeightSyncConfig | None, engine: RolloutEngine, registry: Registry, on_gpu: bool
) -> WeightSyncConfig:
    """Return `given`, or if it is None, the config of the engine's first transport that works here.

    `given` is the config's `weight_sync`. `on_gpu` is true if the trainer's weights are on GPUs.

    Raises:
        ConfigError: If the engine takes no weights, does not support `given`, or has no transport that works here.
    """
    if not isinstance(engine, TakesWeights):
        raise ConfigError.at(
            "source.engine.name",
            "chooses an engine that cannot replace its weights while it generates. Choose another engine, such as "
            "child_process or vllm.",
        )
    supported = listing(engine.transports)
    if given is not None:
        if given.transport not in engine.transports:
            raise ConfigError.at(
                "source.weight_sync.name",
                f"is {given.name}, but source.engine supports only {supported}. Set weight_sync to that, remove it, or "
                "set another source.engine, such as child_process.",
            )
        return given
    registered = registry.names("weight_sync")
    need_gpu: list[str] = []
    for name in filter(registered.__contains__, engine.transports):
        config = cast("WeightSyncConfig", registry.get("weight_sync", name).config(name=name))
        if on_gpu or not config.needs_gpu:
            return config
        need_gpu.append(name)
    reason = f"{listing(need_gpu)} needs weights on a GPU" if need_gpu else f"only {listing(registered)} are registered"
    raise ConfigError.at(
        "source.engine.name",
        f"chooses an engine that supports the transports {supported}, but {reason}. Choose "
        "another engine, or enable the plugin of a transport.",
    )
