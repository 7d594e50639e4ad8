"""Tasksets of verifiers for tests. It is imported only where verifiers is installed."""

import asyncio
import time

import verifiers.v1 as vf


class NumberData(vf.TaskData):
    answer: int
    level: str = "easy"


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.reward(weight=-0.5)
    async def wordy(self, trace) -> float:
        return float(len(trace.last_reply) > 3)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns

    async def setup(self, trace, runtime) -> None:
        if self.data.answer == 99:
            await asyncio.sleep(30.0)
        if self.data.answer == 98:
            raise ValueError("98 is broken")
        if self.data.answer == 97:
            time.sleep(2.0)


class NumberConfig(vf.TasksetConfig):
    count: int = 3


class NumberTasks(vf.Taskset[NumberTask, NumberConfig]):
    def load(self):
        for number in range(self.config.count):
            data = NumberData(prompt=f"What is {number} + 1?", system_prompt="Be brief.", answer=number + 1)
            yield NumberTask(data, self.config.task)


class AdderConfig(vf.ToolsetConfig):
    pass


class Adder(vf.Toolset[AdderConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class AddingTask(NumberTask):
    @classmethod
    def toolsets(cls, config):
        return [Adder(AdderConfig())]


class AddingTasks(vf.Taskset[AddingTask, NumberConfig]):
    def load(self):
        yield AddingTask(NumberData(prompt="What is 2 + 3?", answer=5), self.config.task)


if __name__ == "__main__":
    Adder.run()
