"""Measure supervised steps on a GPU in Spurline and in other code: tokens per second, share of the peak, peak memory.

    python benchmarks/gpu_sft.py [--model 0.6b|1.7b|4b|8b|tiny] [--train all|lora|qlora] [--device cuda|cpu] [--json]
                                 [--steps 10] [--tokens 16384] [--microbatch 8192] [--only NAME ...]
                                 [--peak-tflops 989]

Models have random weights in the shapes of Qwen3, so neither a hub nor a tokenizer is needed. All candidates train on
the same sequences of random tokens (log-normal lengths around 512, at most 4,096), with loss on all tokens except the
first of each sequence. They compute in bf16 with the same optimizer. `--train all` trains all weights, in fp32, `lora`
adapters of rank 16 over a bf16 base, and `qlora` over a base of 4 bits. The default is `all` up to 1.7b, and `lora`
from 4b on. Each candidate runs in its own process, so that its memory peak contains nothing else. Candidates:

- spurline: the backend `local` as a user gets it with `precision: bf16`. `+ plain` is without fused kernels,
  `+ bf16 weights` holds weights in bf16 with fp32 copies in the optimizer, `+ compile` and `+ fp8` are the settings of
  these names. What a library or the GPU does not support is left out.
- fsdp and megatron: these backends with one rank, if they are installed.
- loop: a usual loop with transformers: sequences sorted by length, padding within micro-batches of the same number of
  tokens, scaled-dot-product attention, whole logits, and fused AdamW. The loss is the mean over all tokens.
- strong loop: the loop of an expert (`gpu_phases/strong_loop.py`): packed, varlen attention, Liger's kernels and
  cross-entropy if they are installed. Also `+ compile`, of its layers.
- trl: `SFTTrainer` with packing and no padding, if trl is installed.

Tokens are counted without padding. The FLOPs of a step are for forward and backward without recomputation:
6 x parameters of matrices x tokens (for the output layer, only tokens with loss), plus attention: 6 x layers x heads x
head size x n^2 for a sequence of n tokens (scores and values, half of them masked). With adapters the factor is 4
instead of 6, since gradients of frozen matrices are not computed. The share of the peak (MFU) is FLOPs per second,
divided by the dense bf16 peak of the GPU. Give --peak-tflops if the script does not know the GPU's name.

`peak_bytes` is what torch allocated at the peak of the measured steps, in this process. `device_bytes` is what the GPU
had in use at most, beyond what was in use before, with the CUDA context and what torch keeps for later: the only figure
for backends whose ranks are other processes. `planned_bytes` is the estimate of `spurline plan`.

Gates are ratios within this run, for the fastest Spurline candidate: tokens per second >= 1.0 x each other candidate,
and peak memory <= 1.0 x loop. `--model tiny` has no gates. It shows that the script works, also on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from gpu_phases import strong_loop
from timing import Gate, gates_as_json, print_gates

WARMUP = 3
RANK = 16
LEARNING_RATE = 1e-5

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    return {**_COMMON, **sizes, "num_attention_heads": heads, "tie_word_embeddings": True, **others}


SHAPES = {
    "0.6b": _qwen3(28, 1024, 3072, 16),
    "1.7b": _qwen3(28, 2048, 6144, 16),
    "4b": _qwen3(36, 2560, 9728, 32),
    "8b": _qwen3(36, 4096, 12_288, 32, tie_word_embeddings=False),
    "tiny": _qwen3(2, 64, 128, 4, vocab_size=256, num_key_value_heads=2, head_dim=16),
}
WITH_ADAPTERS = ("4b", "8b")
"""Models of which adapters are trained, if --train does not say otherwise."""

PEAKS = {
    "B200": 2250e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 peak of GPUs, by a part of the GPU's name."""


@dataclass(frozen=True)
class Job:
    """The work of a candidate. `tokens` is the number of tokens of a step, `microbatch` of a micro-batch.

    `train` is `all`, `lora` or `qlora`.
    """

    model: str
    device: str
    steps: int
    tokens: int
    microbatch: int
    longest: int
    train: str = "all"

    @property
    def adapters(self) -> bool:
        return self.train != "all"

    def sequences(self) -> list[list[int]]:
        """Return the sequences of each step, which are the same for all candidates."""
        random = np.random.default_rng(0)
        lengths: list[int] = []
        middle = min(512, self.longest // 4)
        while sum(lengths) < self.tokens:
            lengths.append(int(np.clip(random.lognormal(np.log(middle), 0.8), 16, self.longest)))
        return [random.integers(3, SHAPES[self.model]["vocab_size"], length).tolist() for length in lengths]

    def model_folder(self, folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(SHAPES[self.model]), encoding="utf-8")
        return folder


def flops(job: Job) -> float:
    """Return the FLOPs of one step. See the module's docstring."""
    shape = SHAPES[job.model]
    hidden, layers, size = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    heads, key_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = hidden * size * (2 * heads + 2 * key_heads) + 3 * hidden * shape["intermediate_size"]
    lengths = [len(sequence) for sequence in job.sequences()]
    passes = 4 if job.adapters else 6
    matrices = passes * (
        layers * layer * sum(lengths) + hidden * shape["vocab_size"] * sum(length - 1 for length in lengths)
    )
    return matrices + 6 * layers * heads * size * sum(length**2 for length in lengths)


@dataclass(frozen=True)
class Trainer:
    """A candidate that is ready. `step` takes one step and returns the loss. `about` is added to the figures."""

    step: Callable[[], float]
    close: Callable[[], object] = lambda: None
    about: dict[str, Any] = field(default_factory=dict)


def run_settings(job: Job, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run whose backend has these settings."""
    backend: dict[str, Any] = {"name": "local", "device": job.device, "precision": "bf16"}
    backend |= {"max_tokens_per_microbatch": job.microbatch, **settings}
    if job.adapters:
        backend["lora"] = {"rank": RANK, "base_dtype": "nf4" if job.train == "qlora" else "bf16"}
    plugins = {"fsdp": ["fsdp_backend"], "megatron": ["megatron_backend"]}
    return {
        "plugins": plugins.get(backend["name"], []),
        "run_dir": str(folder / "run"),
        "model": {"path": str(job.model_folder(folder)), "init": "random"},
        "data": {"train": "unused.jsonl", "max_length": job.longest},
        "steps": job.steps + WARMUP,
        "optimizer": {"learning_rate": LEARNING_RATE},
        "schedule": {"name": "constant"},
        "backend": backend,
    }


def spurline(job: Job, folder: Path, settings: dict[str, Any]) -> Trainer:
    """Return the backend with these settings, without Spurline's loop. `loop_overhead.py` measures the loop."""
    from spurline.config.loading import load_config
    from spurline.data.collators.reference import PackedCollator
    from spurline.data.configs import PackedCollatorConfig
    from spurline.data.token_store import TokenStoreBuilder
    from spurline.protocols.collator import ParallelLayout
    from spurline.protocols.loss import Objective
    from spurline.update.reduction import token_mean
    from spurline_models.losses.configs import CrossEntropyConfig
    from spurline_models.losses.cross_entropy import CrossEntropy

    loaded = load_config(run_settings(job, folder, settings))
    config, registry = loaded.config, loaded.host.registry
    with weights_drawn_on(job.device):
        backend: Any = registry.create(
            "backend", config.backend, run=config, registry=registry, total_updates=job.steps + WARMUP
        )
    builder = TokenStoreBuilder(["random"])
    for row, sequence in enumerate(job.sequences()):
        builder.add(sequence, [0] + [1] * (len(sequence) - 1), source=0, row=row)
    store = builder.build()
    samples = store.view(np.arange(len(store), dtype=np.int64))
    collator = PackedCollator(PackedCollatorConfig(max_tokens=job.longest), 0, ParallelLayout())
    batch, normalizer = token_mean(collator.collate(samples, training=True))
    objective = Objective(CrossEntropy(CrossEntropyConfig()), normalizer)
    planned = config.backend.estimate_memory(config, batch.tokens["input_ids"].shape[1], job.tokens)

    facts = {name: str(value) for name, value in backend.facts().items()}
    return Trainer(
        lambda: float(backend.update(batch, objective)["loss"]),
        backend.close,
        {"planned_bytes": planned.peak, "facts": facts},
    )


@contextmanager
def weights_drawn_on(device: str) -> Iterator[None]:
    """Draw random weights on the GPU, and return them on the host: a host needs minutes for those of a large model."""
    from transformers import AutoModelForCausalLM

    if device == "cpu":
        yield
        return
    usual = AutoModelForCausalLM.from_config

    def from_config(*arguments: Any, **settings: Any) -> Any:
        # On the device `meta` there are no weights to draw.
        if torch.get_default_device().type != "cpu":
            return usual(*arguments, **settings)
        with torch.device(device):
            model = usual(*arguments, **settings)
        model = model.to("cpu")
        torch.cuda.empty_cache()
        return model

    with mock.patch.object(AutoModelForCausalLM, "from_config", from_config):
        yield


def built_model(job: Job, folder: Path) -> Any:
    """Return a model with fp32 weights, or with adapters over a bf16 base, built without Spurline."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job.model_folder(folder))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if job.adapters else torch.float32
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if job.adapters:
        import peft

        settings = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    return model.train()


def usual_optimizer(job: Job, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    on_gpu = job.device == "cuda"
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=on_gpu, foreach=not on_gpu)


def by_strong_loop(job: Job, folder: Path, settings: dict[str, Any]) -> Trainer:
    """Return the loop of an expert. The only setting is `compile`."""
    # Layers are replaced before the model is built.
    strong_loop.use_fused_layers()
    model = built_model(job, folder)
    strong_loop.use_varlen_attention(model.get_base_model() if job.adapters else model)
    if settings.get("compile"):
        layers: Any = (model.get_base_model() if job.adapters else model).model.layers
        for layer in layers:
            layer.compile()
    optimizer = usual_optimizer(job, [parameter for parameter in model.parameters() if parameter.requires_grad])
    return Trainer(strong_loop.make_step(model, job.sequences(), job.microbatch, job.device, optimizer))


def by_loop(job: Job, folder: Path, settings: dict[str, Any]) -> Trainer:
    """Return a loop as it is usually written."""
    assert not settings
    model = built_model(job, folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = usual_optimizer(job, trained)
    sequences = sorted(job.sequences(), key=len)
    total = sum(len(sequence) - 1 for sequence in sequences)
    groups: list[list[list[int]]] = [[]]
    for sequence in sequences:
        if groups[-1] and (len(groups[-1]) + 1) * len(sequence) > job.microbatch:
            groups.append([])
        groups[-1].append(sequence)
    batches = [padded(group, job.device) for group in groups]

    def step() -> float:
        summed = torch.zeros((), device=job.device)
        for tokens, mask in batches:
            with torch.autocast(job.device, torch.bfloat16):
                logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
            targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / total
            loss.backward()
            summed += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return summed.item()

    return Trainer(step)


def padded(sequences: Sequence[Sequence[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and mask, both [rows, longest], padded on the right."""
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return tokens.to(device), mask.to(device)


def measure_trl(job: Job, folder: Path) -> dict[str, Any]:
    """`SFTTrainer` on the same sequences in every step. Callbacks between steps measure the time."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, "<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    model = built_model(job, folder)
    # Rows are packed up to the size of a micro-batch. Another length would only cost time.
    steps = job.steps + WARMUP
    accumulated = max(1, round(job.tokens / job.microbatch))
    sequences = job.sequences() * (steps + 1)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulated,
        "packing": True,
        "padding_free": True,
        "max_length": job.microbatch,
        "bf16": True,
        "use_cpu": job.device == "cpu",
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_num_workers": 0,
    }
    marks: list[float] = []
    counts: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(job.device)
            marks.append(time.perf_counter())
            if len(marks) == WARMUP:
                forget_peak(job.device)

    dataset = Dataset.from_dict({"input_ids": sequences})
    trainer: Any = SFTTrainer(
        model=model, args=SFTConfig(**settings), train_dataset=dataset, processing_class=tokenizer, callbacks=[Clock()]
    )
    usual = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *others: Any, **named: Any) -> Any:
        # Rows are not all full. Without padding every token is real.
        counts.append(inputs["input_ids"].numel())
        return usual(model, inputs, *others, **named)

    trainer.training_step = training_step
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        # Steps have different numbers of tokens, so it is their mean that belongs to the mean of the seconds.
        "seconds": float(np.mean(np.diff(marks)[WARMUP - 1 :])),
        "tokens": sum(counts[WARMUP * accumulated :]) / job.steps,
        "peak_bytes": peak_bytes(job.device),
        "loss": losses[0],
        "last_loss": losses[-1],
        "attention": model.config._attn_implementation,
    }


def measure(job: Job, make: Callable[[Job, Path, dict[str, Any]], Trainer], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the median seconds of the steps after the warm-up, and their memory peak."""
    use = DeviceUse(job.device)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trainer = make(job, Path(folder), settings)
        losses = [trainer.step() for _ in range(WARMUP)]
        synchronize(job.device)
        warm = time.perf_counter() - began
        forget_peak(job.device)
        seconds: list[float] = []
        with use:
            for _ in range(job.steps):
                begin = time.perf_counter()
                losses.append(trainer.step())
                synchronize(job.device)
                seconds.append(time.perf_counter() - begin)
        # Ranks are other processes, whose allocations torch does not know here.
        peak = peak_bytes(job.device) if settings.get("name", "local") == "local" else None
        trainer.close()
    return {
        "seconds": float(np.median(seconds)),
        "tokens": sum(map(len, job.sequences())),
        "peak_bytes": peak,
        "device_bytes": use.peak,
        "loss": losses[0],
        "last_loss": losses[-1],
        "start_s": warm,
        **trainer.about,
    }


class DeviceUse:
    """Watches how many bytes of the GPU are in use, by all processes, while the context is open.

    `peak` is beyond what was in use when this object was made. It is None on CPU.
    """

    def __init__(self, device: str) -> None:
        self.peak: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if device == "cuda":
            # The CUDA context of this process comes first, and does not count.
            torch.zeros(1, device="cuda")
            self._before, self.peak = torch.cuda.mem_get_info()[0], 0

    def __enter__(self) -> DeviceUse:
        if self.peak is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        # torch keeps freed memory for later, so reading it now and then finds the peak.
        while not self._stop.wait(0.1):
            assert self.peak is not None
            self.peak = max(self.peak, self._before - torch.cuda.mem_get_info()[0])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int | None:
    """Return the peak of allocated bytes, or None on CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def candidates(job: Job) -> dict[str, dict[str, Any]]:
    """Return the settings of each candidate, in the order in which they are measured."""
    on_gpu = job.device == "cuda"
    has = {name: find_spec(name) is not None for name in ("liger_kernel", "torchao", "trl", "spurline_fsdp_backend")}
    ours: dict[str, dict[str, Any]] = {"spurline": {}}
    if job.train == "qlora":
        return ours
    fused: dict[str, Any] = {"kernels": "liger"} if on_gpu and has["liger_kernel"] else {}
    found: dict[str, dict[str, Any]] = {**ours, "strong loop": {}}
    if not job.adapters:
        found["spurline + bf16 weights"] = {**fused, "weights": "bf16_masters"}
    if fused:
        found["spurline + plain"] = {"kernels": "none"}
    found["loop"] = {}
    if on_gpu:
        found["spurline + compile"] = {**fused, "compile": True}
        if not job.adapters:
            found["spurline + bf16 weights + compile"] = {**fused, "weights": "bf16_masters", "compile": True}
        found["strong loop + compile"] = {"compile": True}
    ranks = {"ranks": 1, "num_threads": None if on_gpu else 1}
    if has["spurline_fsdp_backend"]:
        found["fsdp"] = {"name": "fsdp", **ranks, **fused}
        if on_gpu:
            found["fsdp + compile"] = {"name": "fsdp", **ranks, **fused, "compile": True}
    if has_megatron() and not job.adapters:
        found["megatron"] = {"name": "megatron", **ranks}
    if on_gpu and has["torchao"] and not job.adapters and capability() >= (9, 0):
        found["spurline + compile + fp8"] = {**fused, "compile": True, "fp8": True}
    if has["trl"]:
        found["trl"] = {}
    return found


def capability() -> tuple[int, ...]:
    """Return the compute capability of the first GPU, or (). Makes no CUDA context in this process."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return tuple(map(int, done.stdout.split()[0].split(".")))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


def has_megatron() -> bool:
    """Return whether the backend `megatron` and Megatron-core are installed."""
    return all(find_spec(name) is not None for name in ("spurline_megatron_backend", "megatron"))


def run_child(job: Job, name: str, peak: float | None) -> dict[str, Any]:
    """Measure a candidate in its own process. If it fails, for example out of memory, return the error."""
    command = [sys.executable, __file__, *child_arguments(job, name)]
    command += [] if peak is None else ["--peak-tflops", str(peak / 1e12)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def child_arguments(job: Job, name: str) -> list[str]:
    """Return the arguments with which this script measures one candidate, and prints its figures as a line of JSON."""
    given = ["--child", name, "--model", job.model, "--train", job.train, "--device", job.device]
    return [*given, "--steps", str(job.steps), "--tokens", str(job.tokens), "--microbatch", str(job.microbatch)]


def child(job: Job, name: str, peak: float | None) -> dict[str, Any]:
    """Measure this candidate here."""
    if name == "trl":
        with tempfile.TemporaryDirectory() as folder:
            figure = measure_trl(job, Path(folder))
    else:
        by_hand = {"loop": by_loop, "strong loop": by_strong_loop, "strong loop + compile": by_strong_loop}
        figure = measure(job, by_hand.get(name, spurline), candidates(job)[name])
    figure["tokens_per_s"] = figure["tokens"] / figure["seconds"]
    # trl packs its own rows: a step has about as many tokens, and nearly the same lengths.
    done = flops(job) * figure["tokens"] / sum(map(len, job.sequences()))
    figure["mfu"] = done / figure["seconds"] / peak if peak else None
    return figure


def peak_flops(device: str, given: float | None = None) -> float | None:
    """Return the dense bf16 peak of the device in FLOPs per second: the given one, or what is known of the GPU."""
    if given is not None or device != "cuda":
        return given
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def job_of(
    model: str,
    device: str,
    steps: int,
    train: str | None = None,
    tokens: int | None = None,
    microbatch: int | None = None,
) -> Job:
    """Return the job with what is not given by default."""
    tiny = model == "tiny"
    tokens, microbatch = tokens or (1024 if tiny else 16_384), microbatch or (512 if tiny else 8192)
    train = train or ("lora" if model in WITH_ADAPTERS else "all")
    return Job(model, device, steps, tokens, microbatch, min(microbatch, 4096), train)


def gates_of(figures: dict[str, dict[str, Any]]) -> list[Gate]:
    """Return the gates that compare the fastest Spurline candidate with the others of this run."""
    ours = [figure for name, figure in figures.items() if name.startswith("spurline") and "error" not in figure]
    if not ours:
        return []
    best, gates = max(ours, key=lambda figure: figure["tokens_per_s"]), list[Gate]()
    for other in ("loop", "strong loop", "strong loop + compile", "trl"):
        theirs = figures.get(other, {"error": "not measured"})
        if "error" not in theirs:
            speed = best["tokens_per_s"] / theirs["tokens_per_s"]
            gates.append(Gate(f"tokens/s of spurline to {other}", speed, 1.0, at_least=True))
        if other == "loop" and "error" not in theirs and best["peak_bytes"]:
            memory = best["peak_bytes"] / theirs["peak_bytes"]
            gates.append(Gate("peak memory of spurline to loop", memory, 1.0, at_least=False))
    return gates


def main() -> int:
    """Print the figures and whether the gates are met. Return 1 if a gate is not met or a Spurline candidate fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--train", choices=("all", "lora", "qlora"))
    parser.add_argument("--tiny", action="store_const", const="tiny", dest="model", help="the same as --model tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--only", nargs="+", help="names of candidates")
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    job = job_of(given.model, given.device, given.steps, given.train, given.tokens, given.microbatch)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU. To try the script out: --tiny --device cpu")
    peak = peak_flops(given.device, given.peak_tflops and given.peak_tflops * 1e12)
    if given.child:
        print(json.dumps(child(job, given.child, peak)))
        return 0
    figures: dict[str, dict[str, Any]] = {}
    for candidate in given.only or candidates(job):
        figures[candidate] = figure = run_child(job, candidate, peak)
        if not given.json:
            print(line(candidate, figure), flush=True)
    gates = [] if job.model == "tiny" else gates_of(figures)
    if given.json:
        name = torch.cuda.get_device_name() if job.device == "cuda" else "CPU"
        about = {"model": job.model, "train": job.train, "device": name, "torch": torch.__version__}
        about |= {"flops_per_step": flops(job), "steps": job.steps}
        print(json.dumps({**about, "figures": figures, "gates": gates_as_json(gates)}, indent=2))
    else:
        print_gates(gates)
    failed = any("error" in figure for name, figure in figures.items() if name.startswith("spurline"))
    return int(failed or not all(gate.met for gate in gates))


def line(name: str, figure: dict[str, Any]) -> str:
    """Return a line with the figures of a candidate."""
    if "error" in figure:
        return f"{name:26} failed: {figure['error']}"
    mfu = "" if figure["mfu"] is None else f", {figure['mfu']:.1%} of the peak"
    memory = "" if not figure["peak_bytes"] else f", {figure['peak_bytes'] / 2**30:.1f} GiB"
    return f"{name:26} {figure['tokens_per_s']:10,.0f} tokens/s{mfu}{memory}, loss {figure['loss']:.3f}"


if __name__ == "__main__":
    sys.exit(main())
