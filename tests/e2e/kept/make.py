"""Make the kept checkpoints of this folder, with the packages that this Python has.

    python tests/e2e/kept/make.py [CASE ...]

Each case becomes CASE.tar.xz beside this file, in place of the one that is there:

    inputs/         what the run reads: config.yaml, the model, its rows, and the reward where it has one
    run/            its run directory, as a stop left it: a checkpoint, metrics.jsonl, config.json, summary.json
    expected.jsonl  the steps after that checkpoint, as a run that nobody stopped recorded them
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 4

REWARD = '''\
def early_letters(answer):
    """Share of the response's letters that are in the first half of the alphabet."""
    letters = [letter for letter in answer.response if letter.isalpha()]
    return sum(letter < "n" for letter in letters) / max(1, len(letters))
'''

BASE: dict[str, Any] = {
    "run_dir": "run",
    "model": {"path": "model"},
    "data": {"train": "data.jsonl", "max_length": 64},
    "steps": STEPS,
    "optimizer": {"learning_rate": 3e-3},
    "checkpoint": {"every_steps": 2},
    "report": {"enabled": False},
}
LOCAL = {"backend": {"name": "local", "device": "cpu", "num_threads": 1}}
DROPOUT = {"path": "model", "config_overrides": {"attention_dropout": 0.1}}
RANKS = {"device": "cpu", "ranks": 2, "num_threads": 1}
SFT: dict[str, Any] = {**BASE, "batch_size": 4, "collator": {"name": "packed", "max_tokens": 128}}
ROLLOUTS: dict[str, Any] = {
    "name": "rollouts",
    "prompts_per_step": 4,
    "samples_per_prompt": 3,
    "environment": {
        "name": "single_turn",
        "rewards": {"early": {"name": "function", "path": "rewards.py:early_letters", "in_process": True}},
    },
    "engine": {"name": "in_process", "deterministic": True},
    "sampling": {"max_new_tokens": 6},
}
RL: dict[str, Any] = {**BASE, **LOCAL, "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 2}}

CASES: dict[str, dict[str, Any]] = {
    "sft": {
        **SFT,
        **LOCAL,
        "model": DROPOUT,
        "data": {**BASE["data"], "eval": "data.jsonl"},
        "evaluation": {"every_steps": 2},
        "checkpoint": {"every_steps": 2, "keep_best": "eval/loss"},
        "stop_when": {"metric": "eval/loss", "patience": 2},
    },
    "sft_fsdp": {**SFT, "model": DROPOUT, "plugins": ["fsdp_backend"], "backend": {"name": "fsdp", **RANKS}},
    "sft_megatron": {**SFT, "plugins": ["megatron_backend"], "backend": {"name": "megatron", "tensor": 2, **RANKS}},
    "preference": {
        **BASE,
        **LOCAL,
        "data": {"train": "pairs.jsonl", "max_length": 64},
        "source": "preference",
        "batch_size": 4,
    },
    "rl": {**RL, "source": ROLLOUTS, "loss": {"name": "ppo", "kl": {"coefficient": 0.01}}},
    "rl_critic": {
        **RL,
        "source": {**ROLLOUTS, "advantage": "gae", "kl_in_reward": {"coefficient": 0.1}},
        "critic": {"minibatches": {"prompts_per_minibatch": 4}, "optimizer": {"learning_rate": 1e-3}},
    },
    # The clock decides nothing: attempts of one group share a decode step, and both steps after a publish train on
    # what is generated with its weights. The checkpoint holds groups that were generated ahead.
    "rl_async": {
        **RL,
        "plugins": ["async_rl"],
        "source": {
            **ROLLOUTS,
            "name": "async_rollouts",
            "max_staleness": 1,
            "publish_every": 2,
            "order": "fifo",
            "depth": "full",
            "max_concurrent_groups": 1,
            "correction": "tis",
        },
    },
}


TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4, "tie_word_embeddings": True}


def write_inputs(folder: Path, config: Mapping[str, Any]) -> None:
    """Write what a run reads: the config, a tiny model, rows, and the reward where it has one."""
    from spurline_models.testing.inputs import write_tiny_model

    write_tiny_model(folder / "model", **TINY)
    rows: list[dict[str, Any]] = []
    for number in range(16):
        asked = [{"role": "user", "content": f"say {number}"}]
        good, bad = ([{"role": "assistant", "content": letter * (1 + number % 5)}] for letter in (str(number), "no"))
        pairs = config["data"]["train"] == "pairs.jsonl"
        rows.append({"prompt": asked, "chosen": good, "rejected": bad} if pairs else {"messages": asked + good})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / config["data"]["train"]).write_text(text, encoding="utf-8")
    if "environment" in config.get("source", {}):
        (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train(inputs: Path, run_dir: Path, stop_after: int | None = None) -> None:
    """Train the config of these inputs, to its end or until a stop after a step."""
    from spurline import Run, load_config

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        if step == stop_after:
            # Groups that are generated ahead become part of the checkpoint.
            time.sleep(2)
            run.request_stop("what it has done so far is kept")

    run = Run(load_config(inputs / "config.yaml", [f"run_dir={run_dir}"]), on_step=on_step)
    result = run.train()
    assert result.status == ("finished" if stop_after is None else "stopped"), result


def make(case: str, folder: Path) -> None:
    """Train a case twice below this folder, whole and stopped half way, and write the archive."""
    inputs, whole = folder / "inputs", folder / "whole"
    write_inputs(inputs, CASES[case])
    train(inputs, whole)
    train(inputs, folder / "run", stop_after=STEPS // 2)
    lines = (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    later = [line for line in lines if json.loads(line)["step"] > STEPS // 2]
    (folder / "expected.jsonl").write_text("".join(later), encoding="utf-8")
    with tarfile.open(HERE / f"{case}.tar.xz", "w:xz", preset=9) as archive:
        for name in ("inputs", "run", "expected.jsonl"):
            archive.add(folder / name, name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The member without who made it; None for locks and compiled code."""
    if Path(member.name).name in ("__pycache__", "run.lock"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for case in sys.argv[1:] or CASES:
        with TemporaryDirectory(prefix="kept-") as folder:
            os.environ["SPURLINE_CACHE"] = str(Path(folder, "cache"))
            make(case, Path(folder, case))
        print(f"{case}: {(HERE / f'{case}.tar.xz').stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
