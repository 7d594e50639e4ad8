"""Whole runs whose environment is an agent with OpenAI's client, on a real model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_same_weights, deterministic, read_metrics, write_scorer

from spurline import Run, load_config
from spurline.data.batch import TrainingBatch
from spurline.errors import ConfigError
from spurline_models.local.backend import LocalBackend
from spurline_rl.engines.in_process.engine import InProcessEngine
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult

AGENT = '''
from openai import OpenAI

def talk(session):
    """Two turns, the second on top of the first, rewarded for letters early in the alphabet."""
    messages = list(session.messages)
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as api:
        for question in ("again", None):
            answer = api.chat.completions.create(model=session.model, messages=messages, stream=False)
            messages += [answer.choices[0].message, {"role": "user", "content": question}]
    letters = [letter for letter in (messages[-2].content or "").lower() if letter.isalpha()]
    return {"early": sum(letter < "n" for letter in letters) / max(1, len(letters)), "turns": 2}

def answer(session):
    """Leave the reward to a model."""
    talk(session)
'''


@pytest.fixture
def harness_config(
    spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Two steps of two prompts with two samples, each an attempt of the agent."""
    module = tmp_path / "modules" / "run_agents.py"
    module.parent.mkdir()
    module.write_text(AGENT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(module.parent))
    monkeypatch.delitem(sys.modules, "run_agents", raising=False)
    return {
        "run_dir": str(tmp_path / "run"),
        "plugins": ["async_rl", "agents"],
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "max_length": 128},
        "steps": 2,
        "optimizer": {"learning_rate": 1e-3},
        "schedule": "constant",
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 2},
        "source": {
            "name": "rollouts",
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "environment": {"name": "harness", "agent": "run_agents:talk"},
            "engine": {"name": "in_process", "deterministic": True},
            "sampling": {"max_new_tokens": 6},
            "reward_weights": {"early": 2.0},
        },
    }


Exchange = tuple[list[int], list[int], list[float]]


def exchanges(batch: TrainingBatch) -> list[Exchange]:
    """Prompt, response and the response's logprobs of each row: a response is what has loss."""
    found: list[Exchange] = []
    names = ("input_ids", "segment_ids", "loss_weights", "rollout_logprobs")
    for tokens, segments, weights, logprobs in zip(*(batch.tokens[name].tolist() for name in names), strict=True):
        used = [place for place, segment in enumerate(segments) if segment]
        response = [place for place in used if weights[place] > 0]
        assert response == used[len(used) - len(response) :]
        prompt = used[: len(used) - len(response)]
        found.append(
            ([tokens[at] for at in prompt], [tokens[at] for at in response], [logprobs[at] for at in response])
        )
    return found


def test_a_run_trains_on_exactly_what_the_engine_wrote(
    harness_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Exchange] = []
    trained: list[Exchange] = []
    generate, update = InProcessEngine.generate, LocalBackend.update

    async def record(engine: InProcessEngine, request: GenerationRequest) -> GenerationResult:
        result = await generate(engine, request)
        written.append((list(request.prompt_ids), result.token_ids.tolist(), result.logprobs.tolist()))
        return result

    def note(backend: LocalBackend, batch: TrainingBatch, *others: Any, **named: Any) -> Any:
        trained.extend(exchanges(batch))
        return update(backend, batch, *others, **named)

    monkeypatch.setattr(InProcessEngine, "generate", record)
    monkeypatch.setattr(LocalBackend, "update", note)
    assert Run(load_config(harness_config)).train().status == "finished"
    assert len(written) == 2 * 2 * 2 * 2, "steps, prompts, samples, turns"
    assert sorted(trained) == sorted(written)
    for line in read_metrics(harness_config["run_dir"]):
        assert line["rewards/turns"] == 2
        assert line["mismatch/logprob_diff/max"] < 1e-5
        assert line["groups/drawn"] == 2


def test_a_run_with_an_agent_and_a_reward_model_can_be_repeated_and_resumed_exactly(
    harness_config: dict[str, Any], tmp_path: Path
) -> None:
    source, model = harness_config["source"], harness_config["model"]
    rewards = {"quality": {"name": "model", "role": "judge"}}
    environment = {"name": "harness", "agent": "run_agents:answer", "rewards": rewards}
    harness_config = harness_config | {
        "plugins": [*harness_config["plugins"], "reward_models"],
        "source": source | {"environment": environment, "reward_weights": {"quality": 2.0}},
    }
    with pytest.raises(ConfigError, match="no model with the role 'judge'"):
        load_config(harness_config)
    scorer = write_scorer(tmp_path / "scorer", model["path"])
    harness_config["model"] = model | {"frozen": {"judge": {"path": str(scorer), "head": "score"}}}
    whole = harness_config | {"run_dir": str(tmp_path / "whole")}
    Run(load_config(whole)).train()
    assert all(line["rewards/quality"] != 0 for line in read_metrics(tmp_path / "whole"))
    Run(load_config(harness_config | {"steps": 1})).train()
    Run(load_config(harness_config)).train()
    assert deterministic(read_metrics(harness_config["run_dir"])) == deterministic(read_metrics(tmp_path / "whole"))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
