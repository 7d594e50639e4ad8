"""Models with a score head (`model.head: score`) score each token on every backend as transformers scores a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import fsdp_layouts
import megatron_layouts
import pytest
import torch
from megatron_layouts import write_qwen3
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from spurline.config.loading import LoadedConfig
from spurline.data.batch import TrainingBatch, segment_numbers
from spurline_models.export import export_model
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_rl.testing.backend_cases import minibatch, values_batch
from spurline_rl.testing.backend_runs import backend_run, opened
from spurline_text.tokenizer import load_tokenizer

PLUGINS = ("fsdp_backend", "megatron_backend")
LOCAL = {"name": "models/local", "device": "cpu", "precision": "fp32"}
soak = pytest.mark.slow
ON_RANKS = [
    pytest.param(settings, marks=(pytest.mark.processes, *marks))
    for settings, marks in (
        (fsdp_layouts.on(2), ()),
        (megatron_layouts.on(2, tensor=2), ()),
        (fsdp_layouts.on(3, lora={"rank": 2}), (soak,)),
        (fsdp_layouts.on(2, context=2), (soak,)),
        (megatron_layouts.on(2, context=2), (soak,)),
        (megatron_layouts.on(2, pipeline=2), (soak,)),
    )
]


class ScoredConfig(CrossEntropyConfig):
    """A loss that trains a score head."""

    head: ClassVar[Literal["vocabulary", "score"]] = "score"


def scoring_run(folder: Path, settings: dict[str, Any], **of_model: Any) -> LoadedConfig:
    """A run whose model has a score head. No loss of the plugins at hand trains one, so the head comes afterwards."""
    loaded = backend_run(folder, settings, PLUGINS, **of_model)
    model = loaded.config.model.model_copy(update={"head": "score"})
    object.__setattr__(loaded, "config", loaded.config.model_copy(update={"model": model, "loss": ScoredConfig()}))
    return loaded


def expected_scores(folder: Path, batch: TrainingBatch) -> Tensor:
    """The scores that transformers gives to each text up to and with a token."""
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    numbers, result = segment_numbers(batch), torch.zeros(batch.num_rows, batch.length)
    for row, column in (batch.tokens["loss_weights"] != 0).nonzero().tolist():
        same = (numbers[row] == numbers[row, column]) & (torch.arange(batch.length) <= column)
        tokens = batch.tokens["input_ids"][row][same].long()
        with torch.no_grad():
            result[row, column] = scorer(input_ids=tokens[None]).logits[0, 0]
    return batch.drop_padding_rows(result)


@pytest.mark.parametrize("settings", [LOCAL, {**LOCAL, "lora": {"rank": 2}}, *ON_RANKS], ids=str)
def test_a_trained_score_head_is_exported_and_gives_the_scores_of_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    # 2 ends texts, and transformers would score the token before it.
    folder = write_qwen3(tmp_path / "model", pad_token_id=2)
    loaded = scoring_run(folder, settings)
    with opened(loaded) as (backend, layout), opened(scoring_run(folder, LOCAL)) as (local, _):
        batch, _ = minibatch("packed", layout)
        assert (backend.logprobs(batch) == 0).all()
        for step in range(3):
            values, loss = values_batch(layout, step)
            losses = [one.update(values, loss)["loss"] for one in (backend, local)]
            if "lora" not in settings:
                assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        scores = backend.logprobs(batch)
        assert scores.abs().max() > 1e-4
        export_model(backend, loaded, load_tokenizer(loaded.config.model), tmp_path / "out")
        assert AutoConfig.from_pretrained(tmp_path / "out").pad_token_id == 0
        torch.testing.assert_close(scores, expected_scores(tmp_path / "out", batch), rtol=1e-5, atol=1e-6)
        (tmp_path / "saved").mkdir()
        backend.save(tmp_path / "saved")
    # The folder can be trained on, and scores as a frozen model beside another one.
    with opened(scoring_run(tmp_path / "out", settings)) as (again, _):
        torch.testing.assert_close(again.logprobs(batch), scores, rtol=1e-6, atol=1e-6)
    frozen = {"reward": {"path": str(tmp_path / "out"), "head": "score"}}
    with opened(backend_run(folder, settings, PLUGINS, frozen=frozen)) as (policy, _):
        torch.testing.assert_close(policy.logprobs(batch, "reward"), scores, rtol=1e-6, atol=1e-6)
    with opened(loaded) as (resumed, _):
        resumed.load(tmp_path / "saved")
        assert torch.equal(resumed.logprobs(batch), scores)
