"""Orders that learn from the rewards of drawn prompts. They are components of core's kind `order`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from spurline.errors import Problem
from spurline.protocols.order import Order, OrderConfig
from spurline.protocols.stateful import Stateful


class AdaptiveOrderConfig(OrderConfig):
    """Settings of an order that learns from rewards. Its component is an `AdaptiveOrder`."""

    def problems(self, run: Any) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.source.facts.supplies != "rollouts":
            yield Problem(
                "name",
                f"is {self.name}, which learns from rewards, but source: {run.source.name} has none. Set "
                "data.order: uniform, or choose a source of rollouts.",
            )


@dataclass(frozen=True)
class ScoredDraw:
    """The rewards of one drawn sample.

    Attributes:
        position: Position in the order.
        sample: Number of the sample.
        returns: Weighted sum of rewards of each attempt.
        terms: Reward terms by name, with one value for each attempt that has the term.
    """

    position: int
    sample: int
    returns: tuple[float, ...]
    terms: Mapping[str, tuple[float, ...]]


@runtime_checkable
class MeasuresDraws(Protocol):
    """An order with metrics of its own, which sources of rollouts record with each step."""

    def metrics(self) -> Mapping[str, float]:
        """Return finite numbers by names that begin with `order/`. Called after `observe`."""
        ...


@runtime_checkable
class AdaptiveOrder(Order, Stateful, Protocol):
    """An order that learns from the rewards of drawn samples.

    New samples may depend on observed rewards. A position that was read once keeps its sample, even after a resume,
    since the resumed run reads the positions of interrupted attempts again. Calls never overlap. The order's state is
    saved with the state of the source.
    """

    def observe(self, step: int, draws: Sequence[ScoredDraw]) -> None:
        """Learn from all draws of a step, in ascending position, including filtered ones. Called once per step."""
        ...
