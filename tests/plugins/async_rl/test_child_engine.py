"""The engine child_process keeps the contracts of engines; one process serves all tests of a class."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from child_engines import child_engine, publish, shared_memory

from spurline_rl.protocols.weight_sync import WeightSync
from spurline_rl.testing import EngineUpdateContract, RolloutEngineContract
from spurline_rl.testing.engine_update_contract import ModelPair

pytestmark = pytest.mark.processes

Result = TypeVar("Result")


class SharedEngine:
    """One engine per model, on one event loop, for all tests of a class."""

    def __init__(self, run_dir: Path) -> None:
        self._runner = asyncio.Runner()
        self._run_dir = run_dir
        self._engines: dict[Path, Any] = {}

    def use(self, model: Path, version: int, use: Callable[[Any], Awaitable[Result]]) -> Result:
        async def main() -> Result:
            if model not in self._engines:
                self._engines[model] = child_engine(model, self._run_dir)
            engine = self._engines[model]
            await publish(engine, version, model)
            return await asyncio.wait_for(use(engine), 120)

        return self._runner.run(main())

    def forget(self, model: Path) -> None:
        """The engine of this model was closed."""
        del self._engines[model]

    def close(self) -> None:
        async def main() -> None:
            for engine in self._engines.values():
                await engine.close()

        self._runner.run(main())
        self._runner.close()


@pytest.fixture(scope="class")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    request.cls.shared = SharedEngine(tmp_path_factory.mktemp("run"))
    yield
    request.cls.shared.close()


@pytest.mark.usefixtures("shared")
class TestContract(RolloutEngineContract):
    shared: SharedEngine

    def run(self, model: Path, use: Callable[[Any], Awaitable[Result]]) -> Result:
        return self.shared.use(model, 0, use)

    def test_closing_fails_requests_in_flight_and_later_ones(self, tiny_model: Path) -> None:
        super().test_closing_fails_requests_in_flight_and_later_ones(tiny_model)
        self.shared.forget(tiny_model)

    def test_closing_leaves_no_thread_and_may_be_repeated(self, tiny_model: Path) -> None:
        super().test_closing_leaves_no_thread_and_may_be_repeated(tiny_model)
        self.shared.forget(tiny_model)


@pytest.mark.usefixtures("shared")
class TestUpdates(EngineUpdateContract):
    shared: SharedEngine

    def make_sync(self) -> WeightSync:
        return shared_memory()

    def run_updated(self, models: ModelPair, use: Callable[[Any], Awaitable[Result]]) -> Result:
        return self.shared.use(models.old, 1, use)

    # Each costs a process, as a failed update does.
    @pytest.mark.parametrize("problem", ["missing"])
    def test_weights_of_another_model_are_an_error_and_nothing_is_generated_with_them(
        self, models: ModelPair, problem: str
    ) -> None:
        super().test_weights_of_another_model_are_an_error_and_nothing_is_generated_with_them(models, problem)
