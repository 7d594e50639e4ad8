"""The oracle names the mistakes of small training loops in plain torch, and finds nothing in right ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_stacks import IGNORED, RIGHT, WRONG, batches, model_of, num_learned, padded
from torch import nn
from typer.testing import CliRunner

from spurline.cli import app
from spurline.errors import DataError
from spurline_oracle.command import report
from spurline_oracle.dump import read_dump
from spurline_oracle.recorder import GradientRecorder, exported_gradients, record_trainer
from spurline_oracle.verdict import judge

OFTEN = {
    "llama, torch.float32",
    "qwen3, torch.bfloat16",
    "packed rows",
    "DAPO",
    "DPO",
    "two ranks",
    "each micro-batch averaged by itself",
    "TRL #5619: the tokens of the generation batch, not of the window",
    "axolotl #3608: attention across packed documents",
    "labels shifted after cutting rows",
    "hidden states detached",
    "shared embeddings doubled under their second name",
    "norms of sequence parallelism",
}
"""Stacks that are checked in every run of the tests."""


def stacks(found: dict[str, Any]) -> list[Any]:
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in found]


@pytest.mark.parametrize("name", stacks(RIGHT))
def test_a_right_stack_gets_a_clean_bill(name: str, tmp_path: Path) -> None:
    RIGHT[name](tmp_path)
    verdict = judge(read_dump(tmp_path), "cpu")
    assert verdict.is_clean, report(verdict)
    assert verdict.layer == ""


@pytest.mark.parametrize("name", stacks(WRONG))
def test_the_mistake_of_a_wrong_stack_is_named(name: str, tmp_path: Path) -> None:
    stack, cause = WRONG[name]
    stack(tmp_path)
    verdict = judge(read_dump(tmp_path), "cpu")
    assert [each.title for each in verdict.explanations][:1] == [cause], report(verdict)


@pytest.mark.parametrize(
    ("size", "words"), [(0.1, "No known mistake explains the difference"), (float("nan"), "weight is not finite.")]
)
def test_a_departure_of_the_forward_pass_is_placed_and_a_mistake_without_a_name_gets_none(
    size: float, words: str, tmp_path: Path
) -> None:
    model, batch = model_of("llama"), padded((9, 14), 0)
    recorder = GradientRecorder(model, tmp_path)
    recorder.micro_batch(**batch)
    # The second layer adds a part of the token before, from the sixth token of the second row on.
    change = torch.zeros(2, 14, 1).index_put_((torch.tensor(1), torch.arange(5, 14)), torch.tensor(size))
    hook = lambda module, inputs, output: output + change * output.roll(1, 1)  # noqa: E731
    model.model.layers[1].register_forward_hook(hook, prepend=True)
    model(**batch).loss.backward()
    recorder.save()
    shown = CliRunner().invoke(app, ["check-gradients", str(tmp_path), "--device", "cpu"])
    assert shown.exit_code == 1
    assert "layer 1 of 2: from token 5 of row 1 on" in shown.output
    assert words in shown.output


def test_a_trainer_of_hugging_face_is_recorded_by_one_call(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = [{name: value[0] for name, value in padded((8,), seed).items()} for seed in range(8)]
    for row, length in zip(rows, (8, 5, 6, 8, 4, 8, 8, 8), strict=True):
        row["labels"][length:] = IGNORED
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "report_to": []}
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), use_cpu=True, save_strategy="no", **settings)
    trainer = transformers.Trainer(model_of("qwen3"), arguments, train_dataset=rows)
    record_trainer(trainer, tmp_path / "dump")
    trainer.train()
    verdict = judge(read_dump(tmp_path / "dump"), "cpu")
    assert verdict.is_clean, report(verdict)
    assert len(verdict.dump.rows) == 4


def test_a_loss_of_a_trainer_that_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    grpo = {"epsilon": 0.2, "epsilon_high": None, "beta": 0.0, "temperature": 1.0, "loss_type": "dapo"}
    for name, value in (
        ("vllm_importance_sampling_correction", True),
        ("importance_sampling_level", "sequence"),
        ("delta", 2.0),
        ("top_entropy_quantile", 0.2),
        ("loss_type", "dft"),
    ):
        trainer = SimpleNamespace(args=SimpleNamespace(**{**grpo, "use_vllm": True, name: value}))
        with pytest.raises(ValueError, match=f"Set {name} to"):
            record_trainer(trainer, tmp_path)


class Renamed(nn.Module):
    """A model with names of its own, and gradients that are kept apart, as in Megatron-core."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.weights = nn.ParameterList(causal.parameters())
        self.names = [name for name, _ in causal.named_parameters()]


def test_gradients_are_exported_as_weights_are(tmp_path: Path) -> None:
    model, found = model_of("llama"), batches()
    model.save_pretrained(tmp_path / "model")
    other = Renamed(model)
    recorder = GradientRecorder(other, tmp_path / "dump", {"labels": "next"}, model_path=str(tmp_path / "model"))
    for batch in found:
        shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        recorder.micro_batch(**{**batch, "labels": shifted})
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    nodes: list[Any] = []
    fired: list[int] = []
    for index, weight in enumerate(other.weights):
        weight.main_grad, weight.grad = weight.grad.double(), None
        # Megatron adds gradients to main_grad in such hooks.
        nodes.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, index=index: fired.append(index))
    before = [weight.detach().clone() for weight in other.weights]
    recorder.save(exported_gradients(other, lambda: zip(other.names, other.weights, strict=True)))
    assert all(map(torch.equal, before, other.weights))
    torch.stack([weight.sum() for weight in other.weights]).sum().backward()
    assert sorted(fired) == list(range(len(before)))
    assert judge(read_dump(tmp_path / "dump"), "cpu").is_clean


def test_what_a_dump_lacks_is_said(tmp_path: Path) -> None:
    model, batch = model_of("llama"), padded((9, 14), 0)
    with pytest.raises(DataError, match="not a complete dump"):
        read_dump(tmp_path)
    recorder = GradientRecorder(model, tmp_path, {"name": "policy", "kl": 0.1})
    with pytest.raises(ValueError, match="unknown columns token_type_ids"):
        recorder.micro_batch(**batch, token_type_ids=batch["input_ids"])
    recorder.micro_batch(**batch)
    recorder.save({"model.norm.bias": torch.ones(32)})
    with pytest.raises(DataError, match="needs the columns advantages, reference_logprobs"):
        judge(read_dump(tmp_path), "cpu")
    recorder = GradientRecorder(model, tmp_path)
    with pytest.raises(ValueError, match="no micro-batch was recorded"):
        recorder.save()
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    recorder.micro_batch(**{**batch, "labels": shifted})
    recorder.save({"model.norm.bias": torch.ones(32)})
    with pytest.raises(DataError, match="Labels of the dump name the token after"):
        judge(read_dump(tmp_path), "cpu")
    recorder = GradientRecorder(model, tmp_path)
    recorder.micro_batch(**{**batch, "labels": torch.full_like(batch["labels"], IGNORED)})
    recorder.save({"model.norm.bias": torch.ones(32)})
    with pytest.raises(DataError, match="has no token with loss"):
        read_dump(tmp_path)
    model(**batch).loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(ValueError, match="weights changed since the first"):
        recorder.save()
    model.lora_weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="LoRA adapters"):
        GradientRecorder(model, tmp_path)


def test_the_columns_of_rows_are_read_as_they_are_meant(tmp_path: Path) -> None:
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"submodule": nn.Linear(2, 2)})})
    wrapped.requires_grad_(True).get_parameter("module.submodule.weight").grad = torch.ones(2, 2)
    batch = {"input_ids": torch.ones(2, 7), "loss_mask": torch.ones(2, 7)}

    def rows(**columns: Any) -> Any:
        recorder = GradientRecorder(wrapped, tmp_path, model_path="none")
        recorder.micro_batch(**batch, **columns)
        recorder.save()
        return read_dump(tmp_path)

    dump = rows(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    assert [row.ranges for row in dump.rows] == [[range(3), range(3, 7)]] * 2
    assert list(dump.gradients) == ["submodule.weight"]
    mask, segments = torch.tensor([[1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]), torch.tensor([[1, 1, 0, 0, 2, 2, 2]])
    assert rows(attention_mask=mask, segment_ids=segments).rows[0].ranges == [range(2), range(4, 7)]
    for positions in (None, torch.tensor([[0, 1, 1, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5]])):
        with pytest.raises(DataError, match="row 0: the attention_mask has zeros between tokens of a sequence"):
            rows(attention_mask=mask, position_ids=positions)


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_of_fsdp_record_one_dump(tmp_path: Path) -> None:
    loop = Path(__file__).parents[2] / "support" / "recorded_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(loop)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, str(tmp_path)], check=True, timeout=300, env=os.environ | path)
    verdict = judge(read_dump(tmp_path), "cpu")
    assert verdict.is_clean, report(verdict)
    assert (verdict.dump.facts["weight_dtype"], verdict.dump.facts["dtype"]) == ("float32", "bfloat16")
    assert len(verdict.dump.ranks) == 2
