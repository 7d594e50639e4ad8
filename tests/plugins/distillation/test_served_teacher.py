"""A served teacher scores every group once, and never wrongly, however often its server dies."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_teachers import Server, logprobs_after, served
from transformers import AutoTokenizer

from spurline.errors import ConfigError, DataError
from spurline_distillation.configs import TOP_IDS, TOP_LOGPROBS, ServedTeacherConfig
from spurline_distillation.served import ServedTeacher
from spurline_models.testing import write_tiny_model
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Group, turns_of

pytestmark = pytest.mark.processes

NUM_PROMPTS = int(os.environ.get("SERVED_PROMPTS", "50"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=3)


def teacher(folder: Path, *urls: str, **settings: Any) -> ServedTeacher:
    config = ServedTeacherConfig(urls=urls, **settings)
    run: Any = None
    return ServedTeacher(config, run=run, tokenizer=AutoTokenizer.from_pretrained(folder))


def group(number: int, samples: int = 2) -> Group:
    made = make_trajectories([[(5 + number % 3, 3 + sample)] for sample in range(samples)], seed=number)
    return Group(f"prompt-{number}", number, tuple(made))


def logprobs_of(scored: Group) -> tuple[Any, Any]:
    """The logprobs of all response tokens, and of the whole vocabulary there, by the model itself."""
    own, everything = [], []
    for turn in turns_of([scored]):
        before = np.concatenate([turn.prompt_ids[-1:], turn.response_ids[:-1]])
        everything.append(logprobs_after(before))
        own.append(everything[-1][np.arange(len(before)), turn.response_ids])
    return np.concatenate(own), np.concatenate(everything)


def test_a_teacher_that_is_killed_twice_scores_every_prompt_once_and_none_wrongly(folder: Path) -> None:
    groups = [group(number) for number in range(NUM_PROMPTS)]
    ends: Counter[int] = Counter()

    async def score_all(server: Server) -> list[Group]:
        scorer = teacher(folder, server.url, max_concurrent=4, give_up_after_s=120)

        async def score(one: Group) -> Group:
            scored = await scorer.score(one, prompt=None)  # type: ignore[arg-type]
            ends[one.draw] += 1
            return scored

        async def disturb() -> None:
            for share in (0.2, 0.6):
                while len(ends) < share * NUM_PROMPTS:
                    await asyncio.sleep(0.005)
                server.kill()
                await asyncio.sleep(0.3)
                server.start()

        *scored, _ = await asyncio.gather(*map(score, groups), disturb())
        await scorer.close()
        return scored

    with served(folder) as server:
        scored = asyncio.run(score_all(server))
    assert ends == Counter(dict.fromkeys(range(NUM_PROMPTS), 1))
    for one in scored:
        np.testing.assert_allclose(one.token_columns["teacher_logprobs"], logprobs_of(one)[0], atol=1e-5)


def test_the_likeliest_tokens_come_with_their_logprobs_and_lies_are_not_believed(folder: Path) -> None:
    async def score(server: Server, **settings: Any) -> Group:
        scorer = teacher(folder, server.url, **settings)
        try:
            return await scorer.score(group(1), prompt=None)  # type: ignore[arg-type]
        finally:
            await scorer.close()

    with served(folder, "LIE") as server:
        one = asyncio.run(score(server, top_k=3))
        own, everything = logprobs_of(one)
        np.testing.assert_allclose(one.token_columns["teacher_logprobs"], own, atol=1e-5)
        np.testing.assert_array_equal(one.token_columns[TOP_IDS], np.argsort(-everything, axis=1)[:, :3])
        np.testing.assert_allclose(one.token_columns[TOP_LOGPROBS], -np.sort(-everything, axis=1)[:, :3], atol=1e-5)
        # The first answer of a pair of requests is a lie, and there is no time for a second request.
        with pytest.raises(AttemptFailedError, match="no logprob of token"):
            asyncio.run(score(server, give_up_after_s=0.1))


def test_an_answer_of_another_form_is_asked_for_again_until_the_prompt_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def malformed(self: ServedTeacher, url: str, body: Any) -> Any:
        return [{"prompt_logprobs": [{}] * len(prompt)} for prompt in body["prompt"]]

    async def other(self: ServedTeacher, url: str, body: Any) -> Any:
        return [{"prompt_logprobs": [{"5": {}}] * len(prompt)} for prompt in body["prompt"]]

    with served(folder) as server:
        for answer, said in ((malformed, "no logprob of token"), (other, "KeyError")):
            monkeypatch.setattr(ServedTeacher, "_post", answer)
            scorer = teacher(folder, server.url, give_up_after_s=0.1)
            with pytest.raises(AttemptFailedError, match=said):
                asyncio.run(scorer.score(group(1), prompt=None))  # type: ignore[arg-type]


def test_a_prompt_for_one_turn_is_refused_for_several(folder: Path) -> None:
    made = make_trajectories([[(4, 3), (9, 2)]], seed=0)
    one = Group("prompt", 0, tuple(made), prompts={"teacher": np.arange(3, dtype=np.int32)})
    with served(folder) as server, pytest.raises(DataError, match="has 2 turns"):
        asyncio.run(teacher(folder, server.url).score(one, prompt=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "said"), [("NO_TOKENS", "/tokenize"), ("NO_LOGPROBS", "prompt_logprobs: 2")])
def test_a_server_that_cannot_teach_ends_the_run_before_it_is_first_used(folder: Path, option: str, said: str) -> None:
    async def score_all(scorer: ServedTeacher) -> None:
        try:
            for number in range(4):
                await scorer.score(group(number), prompt=None)  # type: ignore[arg-type]
        finally:
            await scorer.close()

    with served(folder) as good, served(folder, option) as bad:
        with pytest.raises(ConfigError, match=said):
            teacher(folder, good.url, bad.url, top_k=2)
        bad.kill()
        scorer = teacher(folder, good.url, bad.url, top_k=2, model="teacher")
        bad.start()
        bad.wait()
        with pytest.raises(ConfigError, match=said):
            asyncio.run(score_all(scorer))


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["cats"])
    with served(folder) as server, pytest.raises(ConfigError, match=r"tokenizer differs.*cats"):
        ServedTeacher(ServedTeacherConfig(urls=(server.url,)), run=None, tokenizer=tokenizer)  # type: ignore[arg-type]
