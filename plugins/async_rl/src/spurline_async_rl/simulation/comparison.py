"""Everything `spurline simulate` tells: the config's prediction, those of other settings, and the advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spurline_async_rl.simulation.advice import advice
from spurline_async_rl.simulation.prediction import Knobs, Prediction, Predictor, alternatives, recommended, search
from spurline_async_rl.simulation.workload import Workload


@dataclass(frozen=True)
class Comparison:
    """current: of the config. others: with one knob changed, named by it. found: every bound with every number of
    groups at once. lines: advice in sentences."""

    workload: Workload
    num_steps: int
    current: Prediction
    others: Sequence[tuple[str, Prediction]]
    found: Sequence[Prediction]
    lines: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "basis": list(self.workload.basis),
            "steps_simulated": self.num_steps,
            "config": self.current.as_json(),
            "alternatives": [{"changed": name, **other.as_json()} for name, other in self.others],
            "recommended": recommended([self.current, *self.found]).as_json(),
            "advice": list(self.lines),
        }


def compare(workload: Workload, knobs: Knobs, num_steps: int) -> Comparison:
    """Simulate so many steps of each choice."""
    predict = Predictor(workload, num_steps)
    current = predict(knobs)
    others = [(name, predict(other)) for name, other in alternatives(knobs)]
    found = search(predict, knobs)
    return Comparison(workload, num_steps, current, others, found, advice(predict, current, found))
