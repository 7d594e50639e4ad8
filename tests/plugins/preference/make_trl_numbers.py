"""Write `trl_numbers.json`: losses and gradients of preference objectives as TRL computes them.

Run it where TRL is installed (`pip install trl`). The tests only read the file, so they do not need TRL:

    python tests/plugins/preference/make_trl_numbers.py tests/plugins/preference/trl_numbers.json

The model is as small as a language model can be: the logits of the next token are a row of a table [V, V] that the last
token chooses. The loss functions are methods of TRL's trainers, which are made without their constructors, so that no
dataset and no tokenizer comes between the token ids here and the loss.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from torch import Tensor, nn
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

V = 8
Pair = tuple[list[int], list[int], list[int]]
"""Prompt, chosen and rejected answer."""

UNEVEN: list[Pair] = [([1, 2, 3], [4, 5, 6, 7], [4, 6]), ([2], [5], [1, 3, 5, 7, 2]), ([6, 1], [3, 3, 2], [7, 1, 2])]
# TRL averages the likelihood of ORPO over the tokens of prompts and answers together, and that of CPO over the tokens
# of all answers. Spurline averages it over the answer, and then over pairs. With one token in prompts and chosen
# answers of equal length, all of these are the same.
EVEN: list[Pair] = [([1], [4, 5, 6], [4, 6]), ([2], [5, 7, 1], [1, 3, 5, 7]), ([6], [3, 3, 2], [7])]
BATCHES = {"uneven": UNEVEN, "even": EVEN}
LABELLED: list[tuple[list[int], list[int], bool]] = [
    ([1, 2, 3], [4, 5, 6, 7], True),
    ([2], [1, 3, 5, 7, 2], False),
    ([6, 1], [3, 3, 2], True),
    ([5, 5], [7], False),
]


class Bigrams(nn.Module):
    """Returns what TRL reads from models: logits, and what its fused head adds."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        logits = self.table[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        logprobs, targets = torch.log_softmax(logits[:, :-1], -1), labels[:, 1:]
        found = logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        zeros = torch.zeros_like(found)
        return SimpleNamespace(
            log_probs=torch.where(targets == -100, 0.0, found), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )


def padded(sequences: list[list[int]], value: int) -> Tensor:
    longest = max(map(len, sequences))
    return torch.tensor([sequence + [value] * (longest - len(sequence)) for sequence in sequences])


def without_constructor(trainer: type[Any], model: Bigrams, **attributes: Any) -> Any:
    made = trainer.__new__(trainer)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
    )
    metrics: Any = defaultdict(lambda: defaultdict(list))
    usual = {"model": model, "accelerator": accelerator, "aux_loss_enabled": False, "_metrics": metrics}
    vars(made).update(usual | {"_total_train_tokens": 0, "_tp_size": 1} | attributes)
    return made


def answer_logprobs(table: Tensor, prompts: list[list[int]], answers: list[list[int]]) -> Tensor:
    inputs = sequences(prompts, answers)
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    return Bigrams(table)(inputs["input_ids"], labels=labels).log_probs.sum(-1).detach()


def sequences(prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Tensor]:
    pairs = list(zip(prompts, answers, strict=True))
    return {
        "input_ids": padded([prompt + answer for prompt, answer in pairs], 0),
        "attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in pairs], 0),
        "completion_mask": padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in pairs], 0),
    }


def dpo(model: Bigrams, reference: Tensor, pairs: list[Pair], settings: dict[str, Any]) -> Tensor:
    prompts, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
    kind = settings.get("loss_type", "sigmoid")
    smoothing = settings.get("label_smoothing", 0.0)
    trainer = without_constructor(
        DPOTrainer,
        model,
        beta=settings["beta"],
        loss_types=["sigmoid_norm" if settings.get("length_normalized") else kind],
        loss_weights=[1.0],
        label_smoothing=smoothing,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )
    inputs = sequences([*prompts, *prompts], [*chosen, *rejected])
    stored = {
        "ref_chosen_logps": answer_logprobs(reference, prompts, chosen),
        "ref_rejected_logps": answer_logprobs(reference, prompts, rejected),
    }
    return trainer._compute_loss(model, inputs | stored, False)


def kto(model: Bigrams, reference: Tensor, _: list[Pair], settings: dict[str, Any]) -> Tensor:
    prompts, answers, labels = (list(column) for column in zip(*LABELLED, strict=True))
    mismatched = [answers[-1], *answers[:-1]]
    trainer = without_constructor(
        KTOTrainer, model, loss_type="kto", calculate_KL=True, precompute_ref_logps=True, **settings
    )
    kl = {f"KL_{name}": column for name, column in sequences(prompts, mismatched).items()}
    stored = {
        "label": torch.tensor(labels),
        "ref_logps": answer_logprobs(reference, prompts, answers),
        "ref_KL_logps": answer_logprobs(reference, prompts, mismatched),
    }
    return trainer._compute_loss(model, sequences(prompts, answers) | kl | stored, False)


def concatenated(prompts: list[list[int]], answers: list[list[int]], side: str) -> dict[str, Tensor]:
    inputs = sequences(prompts, answers)
    return {
        f"{side}_input_ids": inputs["input_ids"],
        f"{side}_attention_mask": inputs["attention_mask"],
        f"{side}_labels": inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100),
    }


def without_reference(trainer: Any, model: Bigrams, pairs: list[Pair]) -> Tensor:
    prompts, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
    batch = concatenated(prompts, chosen, "chosen") | concatenated(prompts, rejected, "rejected")
    vars(trainer).update(is_encoder_decoder=False, pad_token_id=0, padding_value=0)
    return trainer.get_batch_loss_metrics(model, batch)[0]


def cpo(model: Bigrams, _: Tensor, pairs: list[Pair], settings: dict[str, Any]) -> Tensor:
    attributes = {
        "loss_type": "simpo" if "gamma" in settings else "sigmoid",
        "beta": settings["beta"],
        "simpo_gamma": settings.get("gamma"),
        "label_smoothing": settings.get("label_smoothing", 0.0),
        "cpo_alpha": settings.get("sft_weight", 0.0),
        "alpha": 0.0,
    }
    return without_reference(without_constructor(CPOTrainer, model, **attributes), model, pairs)


def orpo(model: Bigrams, _: Tensor, pairs: list[Pair], settings: dict[str, Any]) -> Tensor:
    return without_reference(without_constructor(ORPOTrainer, model, beta=settings["beta"]), model, pairs)


Compute = Callable[[Bigrams, Tensor, list[Pair], dict[str, Any]], Tensor]
CASES: list[tuple[str, str, dict[str, Any], Compute]] = [
    ("dpo", "uneven", {"beta": 0.4}, dpo),
    ("dpo", "uneven", {"beta": 0.4, "loss_type": "hinge"}, dpo),
    ("dpo", "uneven", {"beta": 0.4, "loss_type": "ipo"}, dpo),
    ("dpo", "uneven", {"beta": 0.4, "loss_type": "robust", "label_smoothing": 0.2}, dpo),
    ("dpo", "uneven", {"beta": 2.0, "length_normalized": True}, dpo),
    ("simpo", "uneven", {"beta": 2.0, "gamma": 0.6}, cpo),
    ("simpo", "uneven", {"beta": 2.0, "gamma": 0.6, "label_smoothing": 0.1}, cpo),
    ("cpo", "uneven", {"beta": 0.3, "label_smoothing": 0.1, "sft_weight": 0.0}, cpo),
    ("cpo", "even", {"beta": 0.3, "sft_weight": 0.5}, cpo),
    ("orpo", "even", {"beta": 0.3}, orpo),
    ("kto", "labelled", {"beta": 0.4, "desirable_weight": 1.0, "undesirable_weight": 1.5}, kto),
]


def main(path: Path) -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(2, V, V, dtype=torch.float64)
    found: list[dict[str, Any]] = []
    for name, batch, settings, compute in CASES:
        model = Bigrams(policy)
        loss = compute(model, reference, BATCHES.get(batch, []), settings)
        loss.backward()
        assert model.table.grad is not None
        gradient = [round(value, 10) for value in model.table.grad.flatten().tolist()]
        found.append({"loss": name, "batch": batch, "settings": settings, "value": loss.item(), "gradient": gradient})
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    tables = {"policy": policy.tolist(), "reference": reference.tolist()}
    content = {"versions": versions, **tables, "batches": BATCHES, "labelled": LABELLED, "cases": found}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
