"""A taskset of verifiers with an environment of its own. It is imported only where verifiers is installed."""

import verifiers.v1 as vf
from number_tasks import NumberTasks

__all__ = ["HigherEnv", "NumberTasks"]


class ShortTasks(NumberTasks):
    """A taskset that `__all__` does not name."""


class HigherEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HigherEnv(vf.Env[HigherEnvConfig]):
    """The model guesses, and the environment answers as its user."""

    async def run(self, task, agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.answer):
                hint = "higher" if segment.last_reply < str(task.data.answer) else "lower"
                segment = await interaction.turn(hint)
