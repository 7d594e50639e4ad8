"""Bring the weights from the training thread, which waits, to engines on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, listing
from spurline.plugins.registry import Registry
from spurline.protocols.backend import Backend
from spurline_async_rl.source.configs import AsyncRolloutsConfig
from spurline_async_rl.source.loop_thread import GRACE_S, LoopThread, ends_the_run
from spurline_async_rl.timeline.records import Timeline
from spurline_async_rl.weights.buckets import weights_on_gpu
from spurline_rl.protocols.rollout_engine import RolloutEngine, TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport, WeightSync, WeightSyncConfig


class Publisher:
    """Publishes to the engines of one run. Raises as `choose_sync` does.

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
        notify: Callable[[], None],
    ) -> None:
        chosen = choose_sync(config.weight_sync, engine, registry, weights_on_gpu(run))
        assert isinstance(engine, TakesWeights)
        self._engine = engine
        self._name = config.engine.name
        self._watchdog_s = config.watchdog_s
        self._loop = loop
        self._timeline = timeline
        self._sync: WeightSync = registry.create("weight_sync", chosen, run=run)
        self._engine.on_awaiting_weights = notify

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        return self._engine.awaiting_weights

    def start_engines(self) -> None:
        """Start the engines, before the first publish, whose time limit is for sending weights only."""
        limit = self._engine.longest_start_s + GRACE_S
        self._loop.run(self._engine.start(), limit, f"Starting rollout engine '{self._name}'")

    def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights] | None = None) -> SyncReport:
        """Return when these engines, or all, generate with the backend's weights.

        Raises:
            RunFailedError: If they do not; nothing may be trained after that.
        """
        what = f"Publishing the weights of version {version} over {self._sync.transport}"
        if engines is None:
            # A start has time limits of its own.
            waiting = f"Starting a rollout engine '{self._name}' again"
            self._loop.run(self._engine.wait_for_one(), self._engine.longest_start_s + GRACE_S, waiting)
        publishing = self._sync.publish(version, backend, [self._engine] if engines is None else engines)
        self._timeline.began("publish")
        with ends_the_run(what):
            limit_s, waits_for = self._sync.timeout_s + GRACE_S, lambda: self._sync.waits_for
            report = self._loop.run(publishing, limit_s, what, every_s=self._watchdog_s, waits_for=waits_for)
        self._timeline.ended("publish")
        return report

    def close(self) -> None:
        """Free what the transport holds."""
        self._sync.close()


def choose_sync(
    given: WeightSyncConfig | None, engine: RolloutEngine, registry: Registry, on_gpu: bool
) -> WeightSyncConfig:
    """Return the config's own `weight_sync`, or the engine's first transport that can be used here.

    `on_gpu` says whether the weights are on GPUs.

    Raises:
        ConfigError: If the engine takes no weights, or does not fit the transport.
    """
    if not isinstance(engine, TakesWeights):
        raise ConfigError.at(
            "source.engine.name",
            "chooses an engine whose weights cannot be replaced while it generates. Choose another one, such as "
            "child_process or vllm.",
        )
    reads = listing(engine.transports)
    if given is not None:
        if given.transport not in engine.transports:
            raise ConfigError.at(
                "source.weight_sync.name",
                f"is {given.name}, which the chosen source.engine does not read: it takes weights by {reads}. Set one "
                "of these, or leave weight_sync out.",
            )
        return given
    registered = registry.names("weight_sync")
    wanting: list[str] = []
    for name in engine.transports:
        if name in registered:
            config = cast("WeightSyncConfig", registry.get("weight_sync", name).config(name=name))
            if on_gpu or not config.needs_gpu:
                return config
            wanting.append(name)
    without = f" ({listing(wanting)} only with weights on a GPU)" if wanting else ""
    raise ConfigError.at(
        "source.engine.name",
        f"chooses an engine that reads {reads}{without}, but this run has {listing(registered)}. Choose another "
        "engine, or enable the plugin that brings the transport.",
    )
