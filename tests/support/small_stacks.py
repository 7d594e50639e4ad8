"""Training loops of a few lines in plain torch and transformers: right ones, and ones with mistakes that were reported.

Each gets a folder, records one update there, and leaves the rest to the oracle. None uses code of the oracle but its
recorder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model_families import family_of, tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, pad

from spurline_oracle.recorder import GradientRecorder

IGNORED = -100
PROMPT = 3
LENGTHS = ((9, 14), (20, 6), (11, 5))
"""Lengths of sequences, by micro-batch."""

Batch = dict[str, Tensor]


def model_of(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    model: Any = tiny_model(family_of(name))
    return model.to(dtype).train()


def padded(lengths: tuple[int, ...], seed: int, side: str = "right") -> Batch:
    """Return a padded micro-batch of random tokens with prompts of three tokens, as a collator makes it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(max(lengths) - length, None)
        ids[row, where] = torch.randint(3, 128, (length,), generator=generator)
        mask[row, where] = 1
        labels[row, where] = torch.where(torch.arange(length) < PROMPT, IGNORED, ids[row, where])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(side: str = "right", lengths: Any = LENGTHS) -> list[Batch]:
    return [padded(each, seed, side) for seed, each in enumerate(lengths)]


def packed(batch: Batch) -> Batch:
    """Return the sequences of a padded micro-batch in one row, as packing without padding makes it."""
    kept = batch["attention_mask"].bool()
    positions = (batch["attention_mask"].cumsum(-1) - 1)[kept]
    return {
        "input_ids": batch["input_ids"][kept][None],
        "labels": batch["labels"][kept][None],
        "position_ids": positions[None],
    }


def num_learned(found: list[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in found)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of cross entropies of labels at the positions after the logits."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def right(folder: Path, name: str, dtype: torch.dtype) -> None:
    model, found = model_of(name, dtype), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    recorder.save()


def right_packed(folder: Path, name: str = "qwen3", dtype: torch.dtype = torch.float32) -> None:
    """Train all but the last norm on packed rows."""
    model, found = model_of(name, dtype), [packed(batch) for batch in batches()]
    model.model.norm.requires_grad_(False)
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        (summed(model(**batch, use_cache=False).logits, batch["labels"]) / num_learned(found)).backward()
    recorder.save()


def right_autocast(folder: Path) -> None:
    model, found = model_of("llama"), batches("left")
    recorder = GradientRecorder(model, folder, loss={"reduction": "sequence_mean"})
    for batch in found:
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        recorder.micro_batch(**batch, position_ids=positions)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**batch, position_ids=positions).logits.float()
        for row in range(2):
            labels = batch["labels"][row : row + 1]
            (summed(logits[row : row + 1], labels) / (labels != IGNORED).sum() / 6).backward(retain_graph=row == 0)
    recorder.save()


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, with 0 for that one."""
    return pad(log_softmax(logits.float()[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


POLICY = {"name": "policy", "clip_low": 0.1, "clip_high": 0.3, "kl": 0.05, "temperature": 0.7}


def policy(
    folder: Path,
    divide: float = 1.0,
    temperature: float = 0.7,
    roll: int = 0,
    counts: dict[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train with DAPO's loss: clipped ratios, a KL term, one normalizer for all micro-batches."""
    model, found = model_of("qwen3", dtype), batches()
    total = num_learned(found)
    recorder = GradientRecorder(model, folder, loss=POLICY)
    recorder.counts(**(counts or {}))
    generator = torch.Generator().manual_seed(5)
    for batch in found:
        ids, mask = batch["input_ids"], (batch["labels"] != IGNORED).float()
        with torch.no_grad():
            logprobs = token_logprobs(model(ids, attention_mask=batch["attention_mask"]).logits / 0.7, ids)
        old = logprobs + 0.3 * torch.randn(ids.shape, generator=generator)
        reference = logprobs + 0.3 * torch.randn(ids.shape, generator=generator)
        advantages = torch.randn(len(ids), generator=generator)
        columns = {"advantages": advantages, "old_logprobs": old, "reference_logprobs": reference}
        recorder.micro_batch(input_ids=ids, attention_mask=batch["attention_mask"], loss_mask=mask, **columns)
        logprobs = token_logprobs(model(ids, attention_mask=batch["attention_mask"]).logits / temperature, ids)
        ratio, each = (logprobs - old.roll(roll, 1)).exp(), advantages[:, None]
        losses = -torch.min(ratio * each, ratio.clamp(0.9, 1.3) * each)
        difference = reference.roll(roll, 1) - logprobs
        losses = losses + 0.05 * (difference.exp() - difference - 1)
        ((losses * mask).sum() / total / divide).backward()
    recorder.save()


def dpo(folder: Path, of_reference: float = 1.0) -> None:
    model, batch = model_of("mistral"), padded((12, 9, 7, 15), 3)
    reference = torch.tensor([-30.0, -20.0, -15.0, -40.0])
    columns = {"pair": torch.tensor([0, 0, 1, 1]), "chosen": torch.tensor([True, False, True, False])}
    recorder = GradientRecorder(model, folder, loss={"name": "dpo", "beta": 0.2})
    recorder.micro_batch(**batch, **columns, reference_logprobs=reference)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    sums = (token_logprobs(logits, batch["input_ids"]) * (batch["labels"] != IGNORED)).sum(-1)
    ratios = sums - of_reference * reference
    (-nn.functional.logsigmoid(0.2 * (ratios[0::2] - ratios[1::2])).mean()).backward()
    recorder.save()


def ranks(folder: Path, local_counts: bool, reduces: bool = True) -> None:
    """Train on two data-parallel ranks, whose gradients are averaged as DDP and FSDP do it."""
    found = batches(lengths=((9, 14), (20, 16), (11, 5), (14, 8)))
    models = [model_of("llama"), model_of("llama")]
    recorders = [GradientRecorder(model, folder, rank=rank, num_ranks=2) for rank, model in enumerate(models)]
    for rank in (0, 1):
        own = found[rank::2]
        for batch in own:
            recorders[rank].micro_batch(**batch)
            count = num_learned(own) if local_counts else num_learned(found) / 2
            logits = models[rank](batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            (summed(logits, batch["labels"]) / count).backward()
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if reduces:
            first.grad = (first.grad + second.grad) / 2
    for recorder in reversed(recorders):
        recorder.save()


def mean_of_means(folder: Path) -> None:
    model, found = model_of("llama", torch.bfloat16), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        (model(**batch).loss / len(found)).backward()
    recorder.save()


def packed_with_mask(folder: Path) -> None:
    """Pack, and pass a mask of ones, after which attention does not look at positions (axolotl #3608)."""
    model, found = model_of("qwen3"), [packed(batch) for batch in batches()]
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        mask = torch.ones_like(batch["input_ids"])
        (summed(model(**batch, attention_mask=mask).logits, batch["labels"]) / num_learned(found)).backward()
    recorder.save()


def padding_learned(folder: Path) -> None:
    """Copy input_ids into labels, padding included."""
    model, found = model_of("gpt2"), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        batch["labels"] = torch.where(torch.arange(batch["labels"].shape[1]) < PROMPT, IGNORED, batch["input_ids"])
    for batch in found:
        recorder.micro_batch(**batch)
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    recorder.save()


def with_labels(folder: Path, change: Any, name: str = "llama") -> None:
    """Train on labels that the loop changes after they were recorded."""
    model, found = model_of(name), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        batch["labels"] = change(batch)
    for batch in found:
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    recorder.save()


def prompts_learned(folder: Path) -> None:
    with_labels(folder, lambda batch: torch.where(batch["attention_mask"] > 0, batch["input_ids"], IGNORED), "gemma")


def shifted_twice(folder: Path) -> None:
    with_labels(folder, lambda batch: pad(batch["labels"][:, 1:], (0, 1), value=IGNORED))


def last_dropped(folder: Path) -> None:
    """Mask the end-of-turn token, because it is also the padding token."""
    ends = lambda batch: batch["attention_mask"].cumsum(-1) == batch["attention_mask"].sum(-1, keepdim=True)  # noqa: E731
    with_labels(folder, lambda batch: batch["labels"].masked_fill(ends(batch), IGNORED), "qwen3")


def halo_lost(folder: Path) -> None:
    """Cut rows into parts for two context-parallel ranks, and shift labels within each part."""
    model, found = model_of("llama"), batches(lengths=((16, 13), (20, 6)))
    recorder = GradientRecorder(model, folder, layout={"context": 2})
    for batch in found:
        recorder.micro_batch(**batch)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        parts = zip(logits.chunk(2, 1), batch["labels"].chunk(2, 1), strict=True)
        (torch.stack([summed(*part) for part in parts]).sum() / num_learned(found)).backward()
    recorder.save()


def embeddings_apart(folder: Path) -> None:
    """Hold a shared embedding twice, on the first and the last pipeline stage, and never sum the two gradients."""
    model, found = model_of("gemma"), batches()
    copy = nn.Parameter(model.lm_head.weight.detach().clone())
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        (summed(hidden @ copy.T, batch["labels"]) / num_learned(found)).backward()
    recorder.save()


def norms_not_summed(folder: Path) -> None:
    """Take for norms the gradient of the first of two sequence-parallel ranks, without the sum over both."""
    model, found = model_of("llama", torch.bfloat16), batches()
    recorder = GradientRecorder(model, folder, layout={"tensor": 2})
    partial: dict[nn.Module, Any] = {}

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        hidden = inputs[0].detach().float()
        hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)

        def add(gradient: Tensor) -> None:
            first = -(-gradient.shape[1] // 2)
            partial[module] = partial.get(module, 0) + (gradient.float() * hidden)[:, :first].sum((0, 1))

        output.register_hook(add)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(keep)
    for batch in found:
        recorder.micro_batch(**batch)
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    for module, gradient in partial.items():
        module.weight.grad = gradient.to(torch.bfloat16)
    recorder.save()


def gated_norms_not_summed(folder: Path) -> None:
    """Keep for norms over heads of linear attention the gradient of the first of two tensor-parallel ranks."""
    model, found = model_of("qwen3_next"), batches()
    recorder = GradientRecorder(model, folder, layout={"tensor": 2})
    partial: dict[nn.Module, Any] = {}

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        hidden, gate = (each.detach() for each in inputs)
        hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
        heads = model.config.linear_num_value_heads

        def add(gradient: Tensor) -> None:
            of_heads = (gradient * hidden * nn.functional.silu(gate)).unflatten(0, (-1, heads))
            partial[module] = partial.get(module, 0) + of_heads[:, : heads // 2].sum((0, 1))

        output.register_hook(add)

    for name, module in model.named_modules():
        if name.endswith("linear_attn.norm"):
            module.register_forward_hook(keep)
    for batch in found:
        recorder.micro_batch(**batch)
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    for module, gradient in partial.items():
        module.weight.grad = gradient
    recorder.save()


def logits_gathered(folder: Path) -> None:
    """Give whole logits to a cross entropy that takes them for one of two parts of the vocabulary."""
    model, found = model_of("llama"), batches()
    recorder = GradientRecorder(model, folder, layout={"tensor": 2})
    for batch in found:
        recorder.micro_batch(**batch)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        of_ranks: list[Tensor] = []
        for rank in (0, 1):
            # Of the vocabularies that the ranks believe in, the first one alone has the labels.
            own = nn.functional.one_hot(labels.clamp(min=0), logits.shape[-1]) * (rank == 0)
            # Both ranks add their sum of exponentials, and each keeps the gradient of its half of the logits.
            of_ranks.append((logits.softmax(-1) / 2 - own).chunk(2, -1)[rank])
        learned = (labels != IGNORED)[..., None] / num_learned(found)
        logits.backward((torch.cat(of_ranks, -1) * learned).detach())
    recorder.save()


class OneRank(nn.Module):
    """A row-parallel layer as one of two tensor-parallel ranks sees it: the other rank's part comes from its sum."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.rank = layer, rank

    def forward(self, hidden: Tensor) -> Tensor:
        parts = [h @ w.T for h, w in zip(hidden.chunk(2, -1), self.layer.weight.chunk(2, 1), strict=True)]
        return parts[self.rank] + parts[1 - self.rank].detach()


def inputs_not_summed(folder: Path) -> None:
    """Leave out the sum over two tensor-parallel ranks in the backward pass of attention and MLP."""
    found = batches()
    whole = model_of("llama")
    recorder = GradientRecorder(whole, folder, layout={"tensor": 2})
    of_ranks: list[dict[str, Tensor]] = []
    for rank in (0, 1):
        model = model_of("llama")
        for layer in model.model.layers:
            layer.self_attn.o_proj = OneRank(layer.self_attn.o_proj, rank)
            layer.mlp.down_proj = OneRank(layer.mlp.down_proj, rank)
        for batch in found:
            if rank == 0:
                recorder.micro_batch(**batch)
            model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
        of_ranks.append(
            {name.replace(".layer.weight", ".weight"): value.grad for name, value in model.named_parameters()}
        )
    gradients = {}
    for name, value in of_ranks[0].items():
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        parts = [each[name].chunk(2, axis)[rank] for rank, each in enumerate(of_ranks)]
        gradients[name] = torch.cat(parts, axis) if "_proj" in name else value
    recorder.save(gradients)


def not_accumulated(folder: Path) -> None:
    model, found = model_of("qwen2_moe"), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        model.zero_grad()
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
    recorder.save(norms=True)


def clipped_too_often(folder: Path) -> None:
    model, found = model_of("llama"), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        model(**batch, num_items_in_batch=num_learned(found)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.37)
    recorder.save()


def logit_scale_lost(folder: Path) -> None:
    """Call the output layer directly, as fused losses do, without the division of the model (Granite)."""
    model, found = model_of("granite"), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        (summed(model.lm_head(hidden), batch["labels"]) / num_learned(found)).backward()
    recorder.save()


def positions_of_padding(folder: Path) -> None:
    """Pad on the left, and let positions count the padding."""
    model, found = model_of("gpt2"), batches("left")
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        positions = torch.arange(batch["input_ids"].shape[1])[None]
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions).logits
        (summed(logits, batch["labels"]) / num_learned(found)).backward()
    recorder.save()


def cut_off(folder: Path) -> None:
    """Lose the gradients before the second layer, with one learned token in each sequence."""
    model, batch = model_of("llama"), padded((5, 5), 0)
    batch["labels"][:, :-1] = IGNORED
    model.model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(), *inputs[1:]))
    recorder = GradientRecorder(model, folder)
    recorder.micro_batch(**batch)
    model(**batch).loss.backward()
    recorder.save()


def shared_doubled(folder: Path) -> None:
    """Give the gradient of a shared weight under both names, the second one doubled."""
    model, batch = model_of("gemma"), padded((6, 5), 0)
    recorder = GradientRecorder(model, folder)
    recorder.micro_batch(**batch)
    model(**batch).loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    recorder.save({**gradients, "lm_head.weight": 2 * model.lm_head.weight.grad})


RIGHT: dict[str, Any] = {
    **{
        f"{name}, {dtype}": lambda folder, name=name, dtype=dtype: right(folder, name, dtype)
        for name in ("llama", "qwen3", "mistral", "gemma", "qwen2_moe", "gpt2")
        for dtype in (torch.float32, torch.bfloat16)
    },
    "packed rows": right_packed,
    "packed rows, bf16": lambda folder: right_packed(folder, "gemma", torch.bfloat16),
    "left padding, mean of sequences, autocast": right_autocast,
    "DAPO": policy,
    "DAPO, bf16": lambda folder: policy(folder, dtype=torch.bfloat16),
    "DPO": dpo,
    "two ranks": lambda folder: ranks(folder, local_counts=False),
}


def not_shifted(folder: Path) -> None:
    model, found = model_of("llama"), batches()
    recorder = GradientRecorder(model, folder)
    for batch in found:
        recorder.micro_batch(**batch)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
        (losses / num_learned(found)).backward()
    recorder.save()


WRONG: dict[str, tuple[Any, str]] = {
    "logits compared with the tokens that were read": (not_shifted, "labels not shifted"),
    "each micro-batch averaged by itself": (mean_of_means, "mean of means over micro-batches"),
    "ms-swift #10117: divided by accumulation steps again": (
        lambda folder: policy(folder, divide=3),
        "scaled by 1 / the number of micro-batches (1/3)",
    ),
    "TRL #5619: the tokens of the generation batch, not of the window": (
        lambda folder: policy(folder, divide=104 / 47, counts={"num_items_in_batch": 104}),
        "scaled by learned tokens / your count num_items_in_batch (47/104)",
    ),
    "axolotl #3608: attention across packed documents": (packed_with_mask, "attention across packed sequences"),
    "Megatron-LM #7452: token counts of ranks": (
        lambda folder: ranks(folder, local_counts=True),
        "mean of means over ranks",
    ),
    "gradients of ranks not reduced": (
        lambda folder: ranks(folder, local_counts=False, reduces=False),
        "only the gradients of the first rank",
    ),
    "padding in labels": (padding_learned, "loss over padding"),
    "prompts in labels": (prompts_learned, "loss over prompts"),
    "labels shifted by the collator and by the model": (shifted_twice, "labels shifted twice"),
    "end-of-turn tokens masked": (last_dropped, "last token of each sequence dropped"),
    "labels shifted after cutting rows": (halo_lost, "context-parallel boundary tokens lost (2 ranks)"),
    "shared embeddings on two stages": (embeddings_apart, "shared embeddings without their part as output layer"),
    "hidden states detached": (cut_off, "no gradient reached model.embed_tokens.weight and 9 others"),
    "shared embeddings doubled under their second name": (shared_doubled, "shared embeddings counted twice"),
    "norms of sequence parallelism": (
        norms_not_summed,
        "missing tensor-parallel sum of the gradients of norms (2 ranks)",
    ),
    "Megatron-LM #7452: norms over heads of linear attention not summed": (
        gated_norms_not_summed,
        "missing tensor-parallel sum of the gradients of norms of linear attention (2 ranks)",
    ),
    "Megatron-LM #7452: gathered logits in a vocabulary-parallel loss": (
        logits_gathered,
        "gathered logits in a vocabulary-parallel loss (2 ranks)",
    ),
    "backward of column-parallel layers": (
        inputs_not_summed,
        "missing tensor-parallel sum behind the layers (2 ranks)",
    ),
    "zero_grad in the loop, norms alone": (not_accumulated, "only the last micro-batch"),
    "clipped after each micro-batch": (clipped_too_often, "micro-batches with factors of their own"),
    "temperature forgotten": (lambda folder: policy(folder, temperature=1.0), "temperature missing"),
    "old log-probabilities misaligned": (
        lambda folder: policy(folder, roll=1),
        "advantages and log-probabilities one token too late",
    ),
    "scale of logits forgotten": (logit_scale_lost, "logits_scaling of the model missing"),
    "reference of DPO forgotten": (lambda folder: dpo(folder, of_reference=0), "reference ignored"),
    "padding counted in positions": (positions_of_padding, "positions that count padding"),
}
