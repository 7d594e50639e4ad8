"""Checkpoints of an earlier version go on with the metrics of that version. `kept/make.py` makes them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from run_helpers import Config, read_metrics, train

from spurline import load_config
from spurline.cli_options import load_run

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
ARCHIVES = sorted((Path(__file__).parent / "kept").glob("*.tar.xz"))
ON_RANKS = ("sft_fsdp.tar.xz", "sft_megatron.tar.xz")
COMPARED = (
    *("epoch", "tokens", "loss_tokens", "lr", "loss", "grad_norm", "eval/loss"),
    *("preference/margin", "reward/mean", "response/length", "policy/entropy", "policy/kl_reference"),
    *("critic/loss", "critic/grad_norm", "kl_reward/mean", "value/return", "staleness/mean", "correction/factor"),
)
"""Metrics that each depend on something else in a checkpoint; which others a step has may change."""


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(path, id=path.name.partition(".")[0], marks=[pytest.mark.processes] * (path.name in ON_RANKS))
        for path in ARCHIVES
    ],
)
def test_a_kept_checkpoint_goes_on_with_the_metrics_of_the_version_that_wrote_it(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as members:
        members.extractall(tmp_path, filter="data")
    inputs, run_dir = tmp_path / "inputs", tmp_path / "run"
    before = read_metrics(run_dir)
    # Reports and exports read the record of the run, whose settings may be gone since.
    assert load_run(run_dir).config.run_dir == run_dir
    # These name files that lie elsewhere now, and could be others.
    moved = ["model.path"] + ["source.environment"] * (inputs / "rewards.py").exists()
    lines = train(load_config(inputs / "config.yaml", [f"run_dir={run_dir}"]), allow_change=moved).lines
    assert lines[:2] == before
    expected = [json.loads(line) for line in (tmp_path / "expected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines[2:]] == [line["step"] for line in expected] == [3, 4]
    for line, recorded in zip(lines[2:], expected, strict=True):
        # The metrics of pairs had the name of the loss then.
        wanted = {name.replace("dpo/", "preference/"): value for name, value in recorded.items()}
        names = [name for name in COMPARED if name in wanted]
        # Other processors and versions of torch round otherwise, and so may a later version of this code; where all of
        # that is the same, these are equal bit for bit. Sums near 0 have lost digits.
        assert {name: line.get(name) for name in names} == pytest.approx(
            {name: wanted[name] for name in names}, rel=1e-5, abs=1e-7
        )


def test_every_kind_of_checkpoint_is_kept() -> None:
    kept = {path.name.partition(".")[0] for path in ARCHIVES}
    assert kept == {"sft", "sft_fsdp", "sft_megatron", "preference", "rl", "rl_critic", "rl_async"}


@pytest.mark.parametrize("kind", ["base_config", "rl_config", "critic"])
def test_the_page_about_checkpoints_names_every_file(kind: str, request: pytest.FixtureRequest) -> None:
    config: Config = request.getfixturevalue("rl_config" if kind == "critic" else kind)
    if kind == "critic":
        config["critic"], config["source"]["advantage"] = {}, "gae"
    checkpoint = train(config, steps=1).checkpoint
    assert checkpoint is not None
    page = PAGE.read_text(encoding="utf-8")
    missing = [path for path in checkpoint.rglob("*") if path.name not in page]
    assert not missing
