"""A taskset of verifiers: sort seven digits. Its reward is the share of digits in their place, and 1 more if all are.

verifiers 0.4 calls what it trains on a taskset: tasks with a prompt, and functions that score the model's answer.
"""

import random

import verifiers.v1 as vf

__all__ = ["SortTasks"]


class SortData(vf.TaskData):
    answer: str


class SortTask(vf.Task[SortData]):
    @vf.reward(weight=0.5)
    async def in_place(self, task, trace) -> float:
        given, wanted = trace.last_reply.split(), task.answer.split()
        return sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def digits(self, trace) -> float:
        return len(trace.last_reply.split())


class SortConfig(vf.TasksetConfig):
    count: int = 2000
    seed: int = 0


class SortTasks(vf.Taskset[SortTask, SortConfig]):
    def load(self):
        draw = random.Random(self.config.seed)
        for _ in range(self.config.count):
            digits = [str(draw.randrange(10)) for _ in range(7)]
            data = SortData(prompt=f"Sort: {' '.join(digits)}", answer=" ".join(sorted(digits)))
            yield SortTask(data, self.config.task)
