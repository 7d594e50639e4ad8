"""Divergences, advantages and prompts of teachers follow their formulas, and keep the contracts of their kinds."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spurline import load_config
from spurline.errors import ConfigError
from spurline.testing import PluginContract
from spurline_distillation.advantage import TeacherAdvantage
from spurline_distillation.configs import (
    TOP_IDS,
    TOP_LOGPROBS,
    DistillationConfig,
    PrivilegedPromptConfig,
    TeacherAdvantageConfig,
)
from spurline_distillation.loss import DIVERGENCE, Distillation
from spurline_distillation.privileged import PrivilegedPrompt
from spurline_models.streams.token_logprobs import WholeDistribution
from spurline_models.testing import LossContract
from spurline_rl.advantages.algorithms import Grpo
from spurline_rl.advantages.configs import GrpoConfig
from spurline_rl.draws import Draw
from spurline_rl.testing import AdvantageContract
from spurline_text.testing.inputs import tiny_tokenizer

RUN = {
    "plugins": ["distillation"],
    "model": {"path": "models/tiny", "frozen": {"teacher": {"path": "models/tiny"}}},
    "data": {"train": "d.jsonl"},
    "steps": 1,
}
ROLLOUTS: dict[str, Any] = {"name": "rollouts", "environment": {"name": "single_turn", "rewards": "exact_match"}}


SERVED: dict[str, Any] = {"name": "served_teacher", "urls": ["http://x"]}
SHOWN: dict[str, Any] = {"name": "privileged_prompt"}
SELF: dict[str, Any] = {
    "advantage": {"name": "teacher", "teacher": "reference"},
    "scorers": [{**SHOWN, "role": "reference"}],
}


class TestPlugin(PluginContract):
    plugin_module = "spurline_distillation.plugin"


class TestWholeVocabulary(LossContract):
    def make_loss(self) -> Distillation:
        return Distillation(DistillationConfig(divergence="jensen_shannon", beta=0.3, temperature=2.0))


class TestLikeliestTokensOfTwoTeachers(LossContract):
    def make_loss(self) -> Distillation:
        return Distillation(DistillationConfig(teachers={"math": "one", "code": "two"}, top_k=3, cross_entropy=0.2))


class TestAdvantage(AdvantageContract):
    compares_samples = False

    def make_advantage(self) -> TeacherAdvantage:
        return TeacherAdvantage(TeacherAdvantageConfig(reward="grpo", reward_weight=0.5))


def drawn(count: int = 6, vocabulary: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made: Any = (torch.randn(count, vocabulary, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    teacher, student = made
    return teacher, student.requires_grad_()


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def divergence(name: str, p: Tensor, q: Tensor, beta: float) -> Tensor:
    if name == "jensen_shannon":
        mixture = beta * p + (1 - beta) * q
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    return kl(p, q) if name == "forward_kl" else kl(q, p)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jensen_shannon"])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_divergence_and_its_gradient_are_those_of_the_formula(
    name: Any, top_k: int | None, temperature: float
) -> None:
    teacher, student = drawn()
    loss = Distillation(DistillationConfig(divergence=name, beta=0.3, top_k=top_k, temperature=temperature))
    made = {"teacher": WholeDistribution(teacher.log_softmax(-1))}
    found = loss.from_logits(WholeDistribution(student.log_softmax(-1)), made, {})[DIVERGENCE]
    p, q = (teacher / temperature).softmax(-1), (student / temperature).softmax(-1)
    if top_k is not None:
        ids = teacher.topk(top_k).indices
        p, q = (
            torch.cat([each.gather(1, ids), 1 - each.gather(1, ids).sum(1, keepdim=True)], dim=1) for each in (p, q)
        )
    wanted = divergence(name, p, q, 0.3)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(*(torch.autograd.grad(each.sum(), student) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_likeliest_tokens_of_a_served_teacher_give_what_those_of_a_model_give() -> None:
    teacher, student = (WholeDistribution(each.log_softmax(-1)) for each in drawn())
    ids, top = teacher.top(4)
    served = Distillation(DistillationConfig(served=True, divergence="reverse_kl"))
    assert (served.needs, served.reads_logits) == ({TOP_IDS, TOP_LOGPROBS}, ())
    found = served.from_logits(student, {}, {TOP_IDS: ids.int(), TOP_LOGPROBS: top})
    wanted = Distillation(DistillationConfig(divergence="reverse_kl", top_k=4))
    torch.testing.assert_close(found, wanted.from_logits(student, {"teacher": teacher}, {}))
    # Two of its tokens that the trained model lacks count as all others.
    smaller = WholeDistribution(student.logprobs[:, :7].log_softmax(-1))
    columns = {TOP_IDS: torch.tensor([[0, 8, 2, 7]]).expand(6, 4), TOP_LOGPROBS: top}
    known = {TOP_IDS: torch.tensor([[0, 2]]).expand(6, 2), TOP_LOGPROBS: top[:, [0, 2]]}
    torch.testing.assert_close(served.from_logits(smaller, {}, columns), served.from_logits(smaller, {}, known))


def test_each_row_learns_from_its_own_teacher_and_rewards_come_on_top() -> None:
    contract = TestAdvantage()
    contract.carry = ("math", "code")  # type: ignore[misc]
    advantage = TeacherAdvantage(TeacherAdvantageConfig(teachers={"math": "one", "code": "three"}, reward="grpo"))
    contract.make_advantage = lambda: advantage  # type: ignore[method-assign]
    scored = contract.scored(contract.groups())
    found = advantage.advantages(scored)["advantages"]
    weights = {
        name: np.concatenate([np.full(int(one.flat.num_response.sum()), one.columns[name]) for one in scored.groups])
        for name in ("math", "code")
    }
    old = scored.column("old_logprobs")
    wanted = weights["math"] * (scored.column("one_logprobs") - old)
    wanted += weights["code"] * (scored.column("three_logprobs") - old)
    wanted += Grpo(GrpoConfig()).advantages(scored)["advantages"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_privileged_prompt_shows_the_solution_in_the_last_message_alone() -> None:
    tokenizer = tiny_tokenizer()
    loaded = load_config(
        {"plugins": ["distillation"], "model": {"path": "m"}, "data": {"train": "d.jsonl"}, "steps": 1}
    )
    text = "{question} (level {level}: {reference})"
    scorer = PrivilegedPrompt(PrivilegedPromptConfig(text=text), run=loaded.config, tokenizer=tokenizer)
    row = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "level": 3}
    draw = Draw(0, "d:0@0", loaded.config.data.train[0], "d.jsonl:1", row)
    [group] = TestAdvantage().groups(num_groups=1)
    scored = asyncio.run(scorer.score(group, draw))
    shown = tokenizer.decode(scored.prompts["teacher"])
    assert "2+2? (level 3: 4)" in shown
    assert shown.endswith("assistant\n")
    assert scored.trajectories is group.trajectories


@pytest.mark.parametrize(
    ("source", "loss", "said"),
    [
        ({"advantage": "teacher", "zero_variance": "refill"}, "ppo", "a teacher gives the advantages"),
        ({"zero_variance": "refill"}, "distillation", "a teacher gives the advantages"),
        ({"advantage": "teacher"}, "cross_entropy", "reads no advantages"),
        ({}, {"name": "distillation", "teachers": {"math": "teacher"}}, "source.carry"),
        ({}, {"name": "distillation", "served": True, "top_k": 3}, "the scorer `served_teacher` chooses"),
        ({"sampling": {"temperature": 0.7}, "scorers": [SERVED]}, "ppo", "temperature"),
        ({}, {"name": "distillation", "beta": 0.3}, "which divergence: forward_kl does not read"),
        ({"advantage": {"name": "teacher", "reward_weight": 0.3}}, "ppo", "`reward` is null"),
        ({"sampling": {"top_k": 20}, "scorers": [SERVED]}, "ppo", "logprobs are of the whole vocabulary"),
        ({"advantage": {"name": "teacher", "served": True}}, "ppo", "no scorer adds teacher_logprobs"),
        ({"advantage": "teacher", "scorers": [SERVED]}, "ppo", "a scorer adds teacher_logprobs"),
        ({"scorers": [SHOWN]}, "distillation", "nothing reads this prompt"),
        (
            {"advantage": {"name": "teacher", "teacher": "reference"}, "scorers": [SHOWN]},
            "ppo",
            "Roles of the.*advantage: reference",
        ),
        (
            {"advantage": {"name": "teacher", "served": True}, "scorers": [SERVED, SHOWN]},
            "ppo",
            "nothing reads this prompt",
        ),
        ({**SELF, "kl_in_reward": {"coefficient": 0.1}}, "ppo", "kl_in_reward compares the policy with the same model"),
        (SELF, {"name": "ppo", "kl": {"coefficient": 0.1}}, "loss: ppo compares the policy with the same model"),
        ({"advantage": "teacher", "scorers": [{**SHOWN, "text": "{question.x}"}]}, "ppo", "only around names"),
        ({"advantage": "teacher", "scorers": [{**SHOWN, "text": "set }"}]}, "ppo", "only around names"),
        ({"advantage": "teacher", "scorers": [{**SHOWN, "text": "{0}"}]}, "ppo", "only around names"),
        ({}, "ppo", "model.frozen.teacher is a model that nothing in this run uses"),
        ({"scorers": [{**SERVED, "role": role, "top_k": 8} for role in "ab"]}, "ppo", "scorers.1 adds teacher_top_ids"),
        ({"scorers": [{**SERVED, "role": "old"}]}, "ppo", "scorers.0 adds old_logprobs, which the batch already has"),
        ({"advantage": "teacher", "kl_in_reward": {"coefficient": 0.1}}, "ppo", "kl_in_reward changes rewards"),
        ({"overlong": {"buffer_tokens": 10}}, "distillation", "overlong changes rewards, and here only a teacher"),
        ({"advantage": "gae"}, "distillation", "needs a critic, and loss: distillation reads no advantages"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(source: dict[str, Any], loss: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({**RUN, "source": {**ROLLOUTS, **source}, "loss": loss})


def test_a_prompt_for_a_served_teacher_comes_before_it_and_one_sample_is_enough_for_a_teacher() -> None:
    advantage = {"name": "teacher", "served": True}
    served = {**RUN, "model": {"path": "models/tiny"}}
    load_config({**served, "source": {**ROLLOUTS, "advantage": advantage, "scorers": [SHOWN, SERVED]}})
    load_config({**RUN, "source": {**ROLLOUTS, "samples_per_prompt": 1}, "loss": "distillation"})


@pytest.mark.parametrize("role", ["old", "rollout"])
def test_a_teacher_cannot_have_the_name_of_a_column_of_the_policy(role: str) -> None:
    model = {"path": "models/tiny", "frozen": {role: {"path": "models/tiny"}}}
    source = {**ROLLOUTS, "advantage": {"name": "teacher", "teacher": role}}
    with pytest.raises(ConfigError, match=f"model.frozen.{role} has a name with another meaning") as caught:
        load_config({**RUN, "model": model, "source": source})
    assert "scorer" not in str(caught.value)


def test_a_teacher_that_learns_from_rewards_too_may_have_penalties_in_them() -> None:
    advantage = {"name": "teacher", "reward": "grpo"}
    load_config({**RUN, "source": {**ROLLOUTS, "advantage": advantage, "overlong": {"buffer_tokens": 10}}})


def test_a_teacher_that_the_run_lacks_is_named_with_the_lines_to_add() -> None:
    model = {"path": "models/tiny"}
    with pytest.raises(ConfigError, match=r"model.frozen"):
        load_config({**RUN, "model": model, "source": {**ROLLOUTS, "advantage": "teacher"}})
    with pytest.raises(ConfigError, match=r"model.frozen"):
        load_config({**RUN, "model": model, "source": "sft", "loss": "distillation"})
