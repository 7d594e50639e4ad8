"""Mini-batches counted in prompts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spurline.config.run_config import RunConfig
from spurline.data.batch import Ragged, TrainingBatch
from spurline.errors import RunFailedError
from spurline.protocols.collator import ParallelLayout
from spurline.testing.fuzzing import fuzzing
from spurline.testing.samples import PAD, check_batch
from spurline_rl.configs import PromptSourceConfig, RolloutsCollatorConfig
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig
from spurline_rl.rollout_batches import ByPrompt, RolloutsCollator
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.training_configs import ByPromptConfig
from spurline_rl.trajectory import Group
from spurline_text.configs import SftSourceConfig

# Per prompt a list of samples, each given by its number of turns.
steps_strategy = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=6)


def rollouts(turns_by_prompt: list[list[int]], ranks: int = 1) -> TrainingBatch:
    """One row per turn; the samples of a prompt share its uid."""
    groups: list[Group] = []
    for prompt, samples in enumerate(turns_by_prompt):
        uid, shapes = f"prompt-{prompt}", [[(2, 1 + turn % 3) for turn in range(turns)] for turns in samples]
        made = [replace(each, uid=uid, sample=number) for number, each in enumerate(make_trajectories(shapes, prompt))]
        groups.append(Group(uid, prompt, tuple(made)))
    collator = RolloutsCollator(RolloutsCollatorConfig(), PAD, ParallelLayout(data=ranks))
    return collator.collate_rollouts(groups)


def prompt_source(prompts: int) -> PromptSourceConfig:
    return PromptSourceConfig(
        name="rollouts",
        prompts_per_step=prompts,
        environment=EnvironmentConfig(name="any"),
        engine=RolloutEngineConfig(name="any"),
        advantage=AdvantageConfig(name="any"),
    )


def by_prompt(prompts: int, ranks: int = 1, *, deals_rows: bool = False, **settings: Any) -> ByPrompt:
    source = prompt_source(prompts)
    run = cast("RunConfig", SimpleNamespace(source=source))
    return ByPrompt(ByPromptConfig(**settings), run, ParallelLayout(data=ranks, deals_rows=deals_rows))


@given(turns=steps_strategy, ranks=st.integers(1, 8), epochs=st.integers(1, 3), data=st.data())
@fuzzing(60)
def test_the_number_of_optimizer_steps_never_depends_on_turns(turns, ranks, epochs, data):
    prompts = len(turns)
    size = data.draw(st.sampled_from([size for size in range(1, prompts + 1) if prompts % size == 0]))
    cutter = by_prompt(prompts, ranks, prompts_per_minibatch=size, update_epochs=epochs)
    parts = cutter.cut(rollouts(turns, ranks))
    assert len(parts) == cutter.steps_per_batch() == prompts // size * epochs
    for number, part in enumerate(parts):
        check_batch(part)
        assert part.num_rows % ranks == 0
        first = number % (prompts // size) * size
        uids = part.without_padding_rows().segments["uid"].values.tolist()
        expected = [f"prompt-{prompt}" for prompt in range(first, first + size) for _ in range(sum(turns[prompt]))]
        assert uids == expected


def test_rows_are_views_of_the_batch_where_the_backend_deals_them_itself():
    batch = rollouts([[1, 2], [1], [3], [2]], ranks=4)
    plain, padded = (by_prompt(4, 4, deals_rows=deals, prompts_per_minibatch=2).cut(batch) for deals in (True, False))
    assert [part.num_rows for part in plain] == [4, 5]
    for part, copied in zip(plain, padded, strict=True):
        real = copied.without_padding_rows()
        for name, column in part.tokens.items():
            assert torch.equal(column, real.tokens[name])
            assert column.untyped_storage().data_ptr() == batch.tokens[name].untyped_storage().data_ptr()


def test_rows_of_a_prompt_that_are_apart_and_a_row_of_several_prompts_are_errors():
    batch = rollouts([[1, 1], [1]]).take([0, 2, 1])
    with pytest.raises(RunFailedError, match="are apart: row 2"):
        by_prompt(2).cut(batch)
    batch = rollouts([[1], [1]])
    shared = Ragged.from_rows([["prompt-0"], ["prompt-1", "prompt-0"]], object)
    with pytest.raises(RunFailedError, match="row 1 holds segments of several prompts: prompt-0, prompt-1"):
        by_prompt(2).cut(replace(batch, segments={**batch.segments, "uid": shared}))


@pytest.mark.parametrize("expected", [1, 3])
def test_another_number_of_prompts_than_configured_is_an_error_naming_the_last(expected):
    with pytest.raises(RunFailedError, match=rf"rows of 2 prompts, .*is {expected} \(last prompt: 'prompt-1'\)"):
        by_prompt(expected).cut(rollouts([[1], [2]]))


def test_a_size_that_does_not_divide_the_step_is_refused_with_the_fix():
    source = prompt_source(6)
    config = ByPromptConfig(prompts_per_minibatch=4)
    [problem] = config.problems(cast("RunConfig", SimpleNamespace(source=source)))
    assert "does not divide source.prompts_per_step: 6" in problem.message
    [problem] = config.problems(cast("RunConfig", SimpleNamespace(source=SftSourceConfig())))
    assert "has no prompts" in problem.message
