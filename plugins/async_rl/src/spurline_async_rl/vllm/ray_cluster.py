"""The Ray cluster that engines run on: joined, or a local one started for this run.

Place on the way: VllmEngine -> this -> placement groups for `ray_engine.py`. Imported only with `placement: ray`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from spurline.errors import ConfigError, Problem
from spurline.rl.thread_calls import in_thread
from spurline_async_rl.vllm_config import VllmEngineConfig


class RayCluster:
    """Open from the first `reserve` to `close`, which shuts down what was started here."""

    def __init__(self, config: VllmEngineConfig):
        self._config = config
        self._is_own = False

    async def reserve(self) -> Any:
        """A placement group for one engine, ready. Raises ConfigError when the cluster can never have room for it."""
        import ray
        from ray.util.placement_group import placement_group

        self._open()
        needs = self._needs()
        for resource, count in needs.items():
            there = ray.cluster_resources().get(resource, 0.0)
            if there < count * self._config.engines:
                raise ConfigError(
                    [
                        Problem(
                            "source.engine.engines",
                            f"is {self._config.engines}, each with {count:g} {resource}, but the Ray cluster has "
                            f"{there:g}. Lower engines or tensor_parallel_size, or add nodes.",
                        )
                    ]
                )
        group = placement_group([needs], strategy="STRICT_PACK")
        try:
            await group.ready()
        except BaseException:
            self.release(group)
            raise
        return group

    def release(self, group: Any) -> None:
        """Give its resources back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)

    def actor_options(self, group: Any) -> dict[str, Any]:
        """Options of the actor that is to run there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._needs()
        return {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
        }

    async def close(self) -> None:
        if self._is_own:
            import ray

            self._is_own = False
            await in_thread(ray.shutdown)

    def _open(self) -> None:
        """Takes seconds, and is not for a thread of its own: Ray's processes end with the thread that started them."""
        import ray

        if ray.is_initialized():
            return
        joins = bool(os.environ.get("RAY_ADDRESS"))
        cpus = None if joins else max(os.cpu_count() or 1, self._config.engines)
        ray.init(num_cpus=cpus, include_dashboard=None if joins else False, logging_level=logging.ERROR)
        self._is_own = True

    def _needs(self) -> dict[str, float]:
        """Resources of one engine."""
        import ray

        has_gpus = ray.cluster_resources().get("GPU", 0.0) > 0
        return {"CPU": 1, **({"GPU": self._config.tensor_parallel_size} if has_gpus else {})}
