"""Rewards of served models, `model` and `judge`, with vLLM's own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from listening import free_port
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from vllm_engines import memorize

from spurline.errors import RunFailedError
from spurline_models.testing import write_tiny_model
from spurline_reward_models.configs import JudgeConfig, ModelRewardConfig
from spurline_reward_models.judge import Judge
from spurline_reward_models.reward import ModelReward
from spurline_rl.protocols.reward import Answer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900), pytest.mark.usefixtures("warm_vllm")]


@asynccontextmanager
async def served(folder: Path, num_tokens: int, *more: str) -> AsyncGenerator[str]:
    """Serve the model as `vllm serve` does, but in this process, which has imported vLLM."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = ["--model", str(folder), *more, "--served-model-name", "judge", "--dtype", "float32"]
    options += ["--enforce-eager", "--max-model-len", str(num_tokens), "--kv-cache-memory-bytes", str(2**26)]
    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    async with build_async_engine_client(args) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        server = uvicorn.Server(uvicorn.Config(app, port=(port := free_port()), log_level="warning"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        await serving


@pytest.fixture(autouse=True)
def any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def test_scores_of_a_vllm_server_are_those_of_the_model_and_what_it_refuses_is_told(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", head_dim=64)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "judge")
    answers = [Answer(f"<|im_start|>user\n{'two ' * n}<|im_end|>\n", "drei " * n, None, {}) for n in range(9)]

    def own(answer: Answer) -> float:
        text = f"{answer.prompt}{answer.response}<|im_end|>"
        with torch.no_grad():
            return float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits)

    def check(url: str) -> None:
        def reward(**settings: Any) -> ModelReward:
            given: Any = {"url": url, "model": "judge", "suffix": "<|im_end|>", **settings}
            return ModelReward(ModelRewardConfig(**given))

        expected = torch.tensor([own(answer) for answer in answers])
        scoring = reward(batch_size=4)
        found = torch.tensor(scoring.score_many(answers))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        chances = torch.tensor(reward(endpoint="classify", url=f"{url}/v1").score_many(answers))
        torch.testing.assert_close(chances, expected.sigmoid(), rtol=0, atol=2e-5)
        with pytest.raises(RunFailedError, match=r"`mine` does not exist.*--runner pooling.*--served-model-name"):
            reward(model="mine").score_many(answers)
        with pytest.raises(RunFailedError, match=r"gives no score.*maximum context length is 256"):
            scoring.score_many([Answer("", "a" * 300, None, {})])

    async def main() -> None:
        async with served(tmp_path / "judge", 256, "--runner", "pooling") as url:
            await asyncio.to_thread(check, url)

    asyncio.run(main())


def test_the_reply_of_a_judge_has_the_schema_and_the_scale_whatever_its_model_would_write(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "judge", head_dim=64, max_position_embeddings=512)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    settings: Any = {"model": "judge", "rubric": "{response}", "scale": (0, 4), "max_new_tokens": 64}
    # What the model learns to write: a mark, one that is not on the scale, and none.
    written = {"a": '{"reason": "ok", "score": 3}', "b": '{"reason": "ok", "score": 9}', "c": "a good answer"}
    wanted = 'Reply with a JSON object {"reason": "...", "score": NUMBER}. The score is from 0 to 4.'
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{answer}\n\n{wanted}"}], add_generation_prompt=True, return_dict=False
        )
        for answer in written
    ]
    memorize(folder, prompts, [tokenizer(f"{text}{tokenizer.eos_token}")["input_ids"] for text in written.values()])

    def marks(**more: Any) -> tuple[list[float], list[float]]:
        judge = Judge(JudgeConfig(**settings, **more))
        answers = [Answer("", response, None, {}) for response in written]
        scores = [judge.score(answer) for answer in answers]
        judge.close()
        return scores, [answer.metrics["cached"] for answer in answers]

    def check(url: str) -> None:
        of_server, cache = f"{url}/v1", str(tmp_path / "marks.sqlite")
        scores, cached = marks(url=of_server)
        assert scores[0] == 0.75
        assert all(0 <= score <= 1 for score in scores)
        assert marks(url=of_server, cache=cache) == (scores, cached) == (scores, [0, 0, 0])
        assert marks(url=of_server, cache=cache) == (scores, [1, 1, 1])

    async def main() -> None:
        async with served(folder, 512) as url:
            await asyncio.to_thread(check, url)

    asyncio.run(main())
