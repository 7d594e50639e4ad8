"""The oracle names the mistakes of small training loops in plain torch, and finds nothing in right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import family_of, tiny_model
from torch import Tensor

from spurline_oracle.dump import read_dump
from spurline_oracle.recorder import GradientRecorder
from spurline_oracle.verdict import Verdict, judge

LENGTHS = ((9, 14), (20, 6), (11, 5))
"""Lengths of sequences, by micro-batch."""
PROMPT = 3
IGNORED = -100


def padded(lengths: tuple[int, ...], seed: int, side: str = "right") -> dict[str, Tensor]:
    """Return a padded micro-batch of random tokens, with prompts of three tokens, as a collator makes it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, length in enumerate(lengths):
        start = 0 if side == "right" else max(lengths) - length
        ids[row, start : start + length] = torch.randint(3, 128, (length,), generator=generator)
        mask[row, start : start + length] = 1
        labels[row, start + PROMPT : start + length] = ids[row, start + PROMPT : start + length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(lengths: Any = LENGTHS, side: str = "right") -> list[dict[str, Tensor]]:
    return [padded(each, seed, side) for seed, each in enumerate(lengths)]


def num_learned(found: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in found)


def model_of(name: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    family = family_of(name)
    family = type(family)(family.model_type, settings={**family.settings, **settings})
    return tiny_model(family).to(dtype)


def dumped(folder: Path, **options: Any) -> Verdict:
    return judge(read_dump(folder), "cpu")


RIGHT = ("llama", "qwen3", "mistral", "gemma", "qwen2_moe", "gpt2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_stack_gets_a_clean_bill(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(name, dtype)
    found = batches()
    recorder = GradientRecorder(model, tmp_path)
    for batch in found:
        recorder.micro_batch(**batch)
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    recorder.save()
    verdict = dumped(tmp_path)
    print(name, dtype, verdict.noise, verdict.departure.total, verdict.departure.excess, verdict.departure.worst, verdict.layer)
    assert verdict.is_clean
    assert verdict.layer == ""


def test_a_wrong_loop_is_named(tmp_path: Path) -> None:
    model = model_of("qwen3")
    found = batches()
    recorder = GradientRecorder(model, tmp_path)
    for batch in found:
        recorder.micro_batch(**batch)
        (model(**batch).loss / len(found)).backward()
    recorder.save()
    verdict = dumped(tmp_path)
    from spurline_oracle.command import report
    print(report(verdict))
    for e in verdict.explanations + verdict.others: print(f"{e.departure.total:.2e} {e.departure.excess:.2e} {e.title}")
    assert verdict.explanations[0].name.startswith("mean of means")
