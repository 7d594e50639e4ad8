"""Record one update of any training loop: its batch, its loss settings, its weights and its gradients.

This file needs torch and safetensors alone. Install it with `pip install spurline-oracle`, or copy it into a project.
The command `spurline check-gradients FOLDER` compares what it wrote with the truth.

```python
recorder = GradientRecorder(model, "dump", loss={"name": "cross_entropy", "reduction": "token_mean"})
for batch in micro_batches:                  # the micro-batches of one update
    recorder.micro_batch(**batch)            # input_ids, labels, attention_mask, position_ids
    (model(**batch).loss / len(micro_batches)).backward()
recorder.save()                              # before clipping, optimizer.step() and zero_grad()
```

A dump is a folder:

- `dump.json`: loss settings, numbers of the layout, dtypes, frozen parameters, and where the model is.
- `rank-N.safetensors`: the micro-batches of data-parallel rank N, as `MICRO_BATCH.COLUMN`, and outputs of layers for
  its first micro-batch, as `layer.INDEX`.
- `gradients.safetensors`: the gradient of each parameter, or its norm.
- `model/`: config and weights, unless `model_path` names a model with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FORMAT = 1
"""The version of the dump format."""

COLUMNS = (
    "input_ids",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "segment_ids",
    "advantages",
    "old_logprobs",
    "reference_logprobs",
    "pair",
    "chosen",
)
"""Names of columns of a batch. `GradientRecorder.micro_batch` describes them."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_CHECKED = {
    "loss_type": ("dapo", "grpo", "nll", "chunked_nll"),
    "label_smoothing_factor": (0,),
    "importance_sampling_level": ("token",),
    "delta": (None,),
    "top_entropy_quantile": (1,),
    "off_policy_mask_threshold": (None,),
    "use_bias_correction_kl": (False,),
}
"""Arguments of trainers that change the loss, with the values that can be checked."""


class GradientRecorder:
    """A recorder of one update.

    In a distributed run each process makes one and calls the same methods. The first process writes gradients and
    weights, which DTensors gather from all processes. Each data-parallel rank writes its own micro-batches.

    Args:
        model: The model that is trained, as the loop uses it (also wrapped by DDP, FSDP2 or torch.compile).
        folder: The folder of the dump. All processes must see the same one.
        loss: Settings of the loss. `name` is `cross_entropy` (default), `policy` (PPO, GRPO, DAPO) or `dpo`.
            `reduction` is `token_mean` (default), `sequence_mean`, `sum`, or a number that sums are divided by.
            The page of the command lists all keys.
        model_path: A folder or hub name of a model with these weights. If None, the weights are written.
        rank: The data-parallel rank of this process. If None, it is the rank in torch.distributed.
        num_ranks: The number of data-parallel ranks. If None, it is the world size.
        records: Whether this process writes its micro-batches. Let one process of each data-parallel rank do so.
        layout: Sizes such as `{"tensor": 2, "context": 2}`.
        layers: Whether to record outputs of layers in the first micro-batch.

    Raises:
        ValueError: If the model has LoRA adapters, which are no part of the truth.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        loss: Mapping[str, Any] | None = None,
        *,
        model_path: str | None = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        records: bool = True,
        layout: Mapping[str, int] | None = None,
        layers: bool = True,
    ) -> None:
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise ValueError("The model has LoRA adapters, which cannot be checked. Train all weights for this update.")
        parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._world_rank = torch.distributed.get_rank() if parallel else rank or 0
        self._model = model
        self._folder = Path(folder)
        self._rank = rank if rank is not None else self._world_rank
        self._records = records
        self._facts: dict[str, Any] = {
            "format": FORMAT,
            "loss": {"name": "cross_entropy", "reduction": "token_mean", **(loss or {})},
            "num_ranks": num_ranks or (torch.distributed.get_world_size() if parallel else 1),
            "layout": dict(layout or {}),
            "counts": {},
            "model_path": model_path,
        }
        self._tensors: dict[str, Tensor] = {}
        self._num_batches = 0
        self._weights: list[float] = []
        self._computed: torch.dtype | None = None
        self._hooks = [
            layer.register_forward_hook(self._watch(f"layer.{index}" if layers else ""))
            for index, layer in enumerate(layers_of(model))
        ]

    def micro_batch(self, **columns: Any) -> None:
        """Record the columns of the next micro-batch, as the model gets them.

        Args:
            **columns: Tensors [rows, length], or lists of such rows. Columns that are None are left out.
                `input_ids`: tokens. `labels`: -100 where there is no loss, else the token at the same position
                (Hugging Face) or the next token (`loss["labels"] = "next"`). `loss_mask`: 1 where there is loss,
                instead of labels. `attention_mask`: 0 on padding. `position_ids`, `segment_ids`: for packed rows, in
                which positions restart or segments differ. `advantages`: [rows] or [rows, length].
                `old_logprobs`, `reference_logprobs`: of the token at the same position; for DPO, [rows] sums of the
                reference. `pair`, `chosen`: [rows], the number of the pair, and whether the row is the chosen one.

        Raises:
            ValueError: If a column has an unknown name.
        """
        unknown = sorted(set(columns) - set(COLUMNS))
        if unknown:
            raise ValueError(f"micro_batch: unknown columns {', '.join(unknown)}. Columns: {', '.join(COLUMNS)}.")
        given = {name: torch.as_tensor(value) for name, value in columns.items() if value is not None}
        self._tensors |= {f"{self._num_batches}.{name}": _copy(value) for name, value in given.items()}
        if self._num_batches == 0:
            self._weights = self._weight_sums()
        self._num_batches += 1

    def counts(self, **counts: float) -> None:
        """Record numbers that the stack divides by. If the gradient is scaled, one of them may explain it."""
        self._facts["counts"] |= {name: float(count) for name, count in counts.items()}

    def save(self, gradients: Mapping[str, Tensor] | None = None, *, norms: bool = False) -> Path:
        """Write the dump after the last backward pass, before gradients are clipped and weights change.

        Args:
            gradients: Gradients by their Hugging Face names, for models with other names. Parameters that they leave
                out are not checked. If None, gradients are read from `.grad` (or Megatron's `.main_grad`) of the
                model's parameters, and each one that is not frozen must have one.
            norms: Whether to write only norms of gradients, which need almost no space and still show most bugs.

        Returns:
            The folder.

        Raises:
            ValueError: If no micro-batch was recorded, or weights changed since the first one.
        """
        for hook in self._hooks:
            hook.remove()
        if self._records and not self._num_batches:
            raise ValueError("save: no micro-batch was recorded. Call micro_batch() before each forward pass.")
        # FSDP may hold whole parameters for some time.
        if self._num_batches and self._facts["num_ranks"] == 1 and self._weight_sums() != self._weights:
            raise ValueError("save: weights changed since the first micro-batch. Call save() before optimizer.step().")
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._records:
            save_file(self._tensors, self._folder / f"rank-{self._rank}.safetensors")
        parameters = dict(self._model.named_parameters())
        frozen = None
        if gradients is None:
            gradients = {name: value for name, each in parameters.items() if (value := _gradient(each)) is not None}
            frozen = [_clean(name) for name, parameter in parameters.items() if not parameter.requires_grad]
        gradients = self._whole(gradients)
        kept = set(self._model.state_dict())
        buffers = {name: value for name, value in self._model.named_buffers() if name in kept}
        weights = self._whole({} if self._facts["model_path"] else {**parameters, **buffers})
        if self._world_rank != 0:
            return self._folder
        shown = {n: value.double().norm().reshape(1) if norms else _copy(value) for n, value in gradients.items()}
        save_file(shown, self._folder / "gradients.safetensors")
        if weights:
            self._save_model(weights)
        first = next(iter(parameters.values()))
        self._facts |= {
            "norms": norms,
            "frozen": frozen,
            "weight_dtype": str(first.dtype).removeprefix("torch."),
            "dtype": str(self._computed or first.dtype).removeprefix("torch."),
            "tf32": first.is_cuda and torch.get_float32_matmul_precision() != "highest",
        }
        (self._folder / "dump.json").write_text(json.dumps(self._facts, indent=2))
        return self._folder

    def _weight_sums(self) -> list[float]:
        """Return the sum of each parameter, or of its part in this process."""
        parts = [getattr(each, "_local_tensor", each).detach() for each in self._model.parameters()]
        return [float(part.sum(dtype=torch.float64)) for part in parts]

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors on the host, by clean names, in the first process. Every process must call it."""
        found: dict[str, Tensor] = {}
        for name, value in tensors.items():
            gathered: Tensor = getattr(value, "full_tensor", lambda value=value: value)()
            if self._world_rank == 0:
                found[_clean(name)] = gathered.detach().cpu()
        return found

    def _save_model(self, weights: dict[str, Tensor]) -> None:
        model: Any = self._model
        while not hasattr(model, "config") and hasattr(model, "module"):
            model = model.module
        if not hasattr(model, "save_pretrained"):
            raise ValueError(
                "The model has no save_pretrained, so its weights cannot be written as a Hugging Face folder. Give "
                "model_path, a folder with a config.json and the same weights."
            )
        model = getattr(model, "_orig_mod", model)
        model.save_pretrained(self._folder / "model", state_dict=weights)

    def _watch(self, key: str) -> Any:
        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not torch.is_grad_enabled() or type(hidden) is not Tensor:
                return
            kind = hidden.device.type
            # Under autocast, sums over layers stay in fp32.
            self._computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            if key and key not in self._tensors:
                self._tensors[key] = _copy(hidden)

        return see


def record_trainer(trainer: Any, folder: str | Path, loss: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Record the first update of a Hugging Face `Trainer`, such as TRL's SFTTrainer and GRPOTrainer.

    Call it before `trainer.train()`. The dump is complete when the first update is made.

    Args:
        trainer: The trainer.
        folder: The folder of the dump.
        loss: Settings of the loss. If None, they are those of a GRPOTrainer's arguments, or cross entropy averaged
            over tokens.
        **options: Further arguments of `GradientRecorder`.

    Raises:
        ValueError: If the trainer's loss cannot be checked.
    """
    recorder: GradientRecorder | None = None
    own = {**_loss_of(trainer.args), **(loss or {})}
    compute_loss, training_step = trainer.compute_loss, trainer.training_step

    def record_loss(model: nn.Module, inputs: Mapping[str, Any], *rest: Any, **named: Any) -> Any:
        columns = grpo_columns(inputs) if "completion_ids" in inputs else inputs
        if recorder is not None:
            recorder.micro_batch(**{name: columns[name] for name in COLUMNS if name in columns})
            if (count := inputs.get("num_items_in_batch", named.get("num_items_in_batch"))) is not None:
                recorder.counts(num_items_in_batch=count)
        return compute_loss(model, inputs, *rest, **named)

    def step(model: nn.Module, inputs: Any, *rest: Any, **named: Any) -> Any:
        nonlocal recorder
        if recorder is None:
            recorder = GradientRecorder(model, folder, own, **options)
            recorder.counts(gradient_accumulation_steps=trainer.args.gradient_accumulation_steps)
        result = training_step(model, inputs, *rest, **named)
        if trainer.accelerator.sync_gradients:
            recorder.save()
            trainer.compute_loss, trainer.training_step = compute_loss, training_step
        return result

    trainer.compute_loss, trainer.training_step = record_loss, step


def exported_gradients(model: nn.Module, export: Callable[[], Iterable[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    """Return gradients under the names, and cut and joined in the way, in which `export` returns weights.

    It is for Megatron-core and other models with names of their own. Gradients take the places of the modules'
    parameters while `export` runs, so `export` must look at the modules. What it does to weights must be linear:
    rename, cut, join, permute and gather.
    """
    held = [(module, dict(module._parameters)) for module in model.modules()]
    # Data of another dtype would cut a parameter off from the hooks that add its gradients to main_grad.
    places: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        gradient = _gradient(parameter)
        value = torch.zeros_like(parameter) if gradient is None else gradient.detach()
        places[parameter] = nn.Parameter(value, parameter.requires_grad)
        vars(places[parameter]).update(vars(parameter))
    try:
        for module, own in held:
            module._parameters.update({name: places[each] for name, each in own.items() if each is not None})
        return {name: _copy(value) for name, value in export()}
    finally:
        for module, own in held:
            module._parameters.update(own)


def grpo_columns(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a batch of TRL's GRPOTrainer, whose prompts are padded left, and completions right."""
    prompts, completions = inputs["prompt_ids"], inputs["completion_ids"]
    learned = inputs["completion_mask"] * inputs.get("tool_mask", 1)

    def whole(value: Tensor) -> Tensor:
        return torch.cat([value.new_zeros(len(value), prompts.shape[1]), value], dim=1)

    columns = {
        "input_ids": torch.cat([prompts, completions], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        "loss_mask": whole(learned),
        "advantages": inputs["advantages"] if inputs["advantages"].dim() == 1 else whole(inputs["advantages"]),
    }
    for name, given in (("old_logprobs", "old_per_token_logps"), ("reference_logprobs", "ref_per_token_logps")):
        if inputs.get(given) is not None:
            columns[name] = whole(inputs[given])
    return columns


def _loss_of(arguments: Any) -> dict[str, Any]:
    """Return the settings of the loss of a trainer's arguments, beyond the defaults."""
    checked = dict(_CHECKED)
    if getattr(arguments, "use_vllm", False):
        checked["vllm_importance_sampling_correction"] = (False,)
    for name, values in checked.items():
        value = getattr(arguments, name, values[0])
        if value not in values:
            raise ValueError(f"{name}={value!r} cannot be checked. Set {name} to {' or '.join(map(repr, values))}.")
    if not hasattr(arguments, "epsilon"):
        return {}
    low = arguments.epsilon
    return {
        "name": "policy",
        "reduction": {"dapo": "token_mean", "grpo": "sequence_mean"}[arguments.loss_type],
        "clip_low": low,
        "clip_high": low if arguments.epsilon_high is None else arguments.epsilon_high,
        "kl": arguments.beta,
        "temperature": arguments.temperature,
    }


def _clean(name: str) -> str:
    """Return the name of a parameter without the wrappers of DDP, FSDP, checkpointing and torch.compile."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(dropwhile(lambda part: part == "module", parts))


def _copy(value: Tensor) -> Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _gradient(parameter: Tensor) -> Tensor | None:
    return parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the list with the most weights, which are the layers in all common models."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.ModuleDict)]
    largest = max(lists, key=lambda found: sum(each.numel() for each in found.parameters()), default=nn.ModuleList())
    return list(largest.values() if isinstance(largest, nn.ModuleDict) else largest)
