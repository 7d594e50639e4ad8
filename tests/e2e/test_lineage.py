"""Runs with plugins: [lineage]: their forks, the recomputation of their steps, and the shares of an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from async_runs import asynchronous
from run_helpers import Config, Spurline, assert_same_weights, deterministic, read_metrics, train

from spurline.digests import digest_file
from spurline_lineage.recorder import read_lineage


def recorded(config: Config, **changes: Any) -> Config:
    """The config with a lineage, and with a checkpoint of each second step."""
    plugins = [*config.get("plugins", ()), "lineage"]
    return {**config, "plugins": plugins, "checkpoint": {"every_steps": 2, "keep_last": 9}, **changes}


def chains(run_dir: object) -> dict[int, str]:
    return {step: line["chain"] for step, line in read_lineage(Path(str(run_dir))).items()}


@pytest.mark.parametrize("kind", ["rows of data", "rollouts", "asynchronous rollouts"])
def test_a_fork_without_changes_is_its_parent_to_the_end(
    kind: str, spurline: Spurline, request: pytest.FixtureRequest
) -> None:
    config = request.getfixturevalue("base_config" if kind == "rows of data" else "rl_config")
    if kind == "asynchronous rollouts":
        config = asynchronous(config, max_staleness=0)
    config = recorded(config, steps=4)
    parent = Path(train(config).run_dir)
    fork = parent.with_name("fork")
    code, _, err = spurline("fork", f"{parent}@2", "--run-dir", fork)
    assert code == 0, err
    assert deterministic(read_metrics(fork)) == deterministic(read_metrics(parent))[2:]
    assert chains(fork) == {step: chain for step, chain in chains(parent).items() if step > 2}
    assert_same_weights(fork, parent)
    history = json.loads((fork / "summary.json").read_text())["history"]
    assert history == [{"step": 2, "key": "run_dir", "before": str(parent), "now": str(fork)}]


def test_a_changed_fork_equals_its_parent_up_to_the_first_step_that_the_change_touches(
    rl_config: Config, spurline: Spurline
) -> None:
    parent = Path(train(recorded(rl_config, steps=4)).run_dir)
    fork = parent.with_name("fork")
    code, _, err = spurline("fork", f"{parent}@2", "--set", "loss.clip_high=0.0001", "--run-dir", fork)
    assert code == 0, err
    then, now = (read_lineage(folder) for folder in (parent, fork))
    # Weights are the first thing that the loss touches. Before, even the rollouts are the same.
    assert {name for name in then[3] if then[3][name] != now[3][name]} == {"weights_after", "chain"}
    assert now[4]["weights_before"] == now[3]["weights_after"]
    assert now[4]["rows"] == then[4]["rows"]


def flipped(path: Path, place: int = 0) -> None:
    """Flip one bit of a file. The place is counted in bytes, and from the end if it is negative."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["rows of data", "rollouts"])
def test_verify_passes_on_what_is_intact_and_finds_each_flipped_bit(
    kind: str, spurline: Spurline, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = recorded(request.getfixturevalue("base_config" if kind == "rows of data" else "rl_config"), steps=5)
    data = tmp_path / "data.jsonl"
    data.write_bytes(Path(config["data"]["train"]).read_bytes())
    config["data"] = {**config["data"], "train": str(data)}
    run_dir = Path(train(config).run_dir)
    assert spurline("verify", run_dir)[:2] == (0, "Equal: steps 5 to 5 were recomputed, and the record fits together.\n")
    code, out, _ = spurline("verify", run_dir, "--step", 4, "--from", "start")
    assert (code, out) == (0, "Equal: steps 1 to 4 were recomputed, and the record fits together.\n")

    if kind == "rollouts":
        kept = run_dir / "rollouts/step-000003.parquet"
        flipped(kept, 1000)
        code, out, _ = spurline("verify", run_dir)
        assert (code, out.splitlines()[0]) == (
            1,
            "step 3: rollouts/step-000003.parquet: the content of the file has changed",
        )
        kept.unlink()

    # A weight of the checkpoint, first as a disk would flip it, and then with a digest that fits.
    weights = run_dir / "checkpoints/step-00000002/backend/model.safetensors"
    flipped(weights, -5)
    code, out, _ = spurline("verify", run_dir, "--step", 3)
    assert code == 1
    assert out.startswith("step 3: checkpoint:")
    assert "model.safetensors is damaged" in out
    manifest = weights.parents[1] / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["backend/model.safetensors"]["xxh3"] = digest_file(weights).xxh3
    manifest.write_text(json.dumps(content))
    code, out, _ = spurline("verify", run_dir, "--step", 3)
    assert code == 1
    assert out.startswith("step 3: weights before:")

    # A letter of a row of the data.
    content = data.read_text(encoding="utf-8")
    place = content.rindex('"content": "') + len('"content": "')
    flipped(data, len(content[:place].encode()))
    code, out, _ = spurline("verify", run_dir)
    assert code == 1
    assert out.startswith("step 5: rows:")
    code, out, _ = spurline("verify", run_dir, "--from", "start")
    assert code == 1
    assert ": rows:" in out
    assert [path.name for path in run_dir.iterdir() if path.name == "again"] == []
