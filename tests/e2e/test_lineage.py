"""Runs with plugins: [lineage]: their forks, the recomputation of their steps, and the shares of an update."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from async_runs import asynchronous
from backend_batches import excite, local_backend
from run_helpers import (
    Config,
    KillableProcess,
    Spurline,
    assert_same_weights,
    deterministic,
    on_ranks,
    read_metrics,
    train,
    write_pairs,
)
from safetensors.torch import load_file

from spurline.digests import digest_file
from spurline.plugins import hookimpl
from spurline.run.evaluations.evaluation import DataEvaluation
from spurline_insight.view.runs import ViewedRun
from spurline_lineage.blame import blame_step, groups_alone
from spurline_lineage.fingerprints import policy_hash
from spurline_lineage.recorder import read_lineage
from spurline_models.local.backend import LocalBackend
from spurline_rl import policy


def recorded(config: Config, **changes: Any) -> Config:
    """The config with a lineage, and with a checkpoint of each second step."""
    plugins = [*config.get("plugins", ()), "lineage"]
    return {**config, "plugins": plugins, "checkpoint": {"every_steps": 2, "keep_last": 9}, **changes}


def chains(run_dir: object) -> dict[int, str]:
    return {step: line["chain"] for step, line in read_lineage(Path(str(run_dir))).items()}


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which an engine never samples the same tokens twice."""
    drawn = random.Random(7)
    return lambda: monkeypatch.setattr(policy, "derive_seed", lambda *_: drawn.getrandbits(62))


@pytest.mark.parametrize("kind", ["rows of data", "rollouts", "asynchronous rollouts"])
def test_a_fork_without_changes_is_its_parent_to_the_end_even_if_the_engine_is_not_deterministic(
    kind: str, spurline: Spurline, request: pytest.FixtureRequest, noise: Callable[[], None]
) -> None:
    config = request.getfixturevalue("base_config" if kind == "rows of data" else "rl_config")
    if kind == "asynchronous rollouts":
        config = asynchronous(config, max_staleness=0)
    config = recorded(config, steps=4)
    parent = Path(train(config).run_dir)
    fork = parent.with_name("fork")
    noise()
    code, _, err = spurline("fork", f"{parent}@2", "--run-dir", fork)
    assert code == 0, err
    assert "are generated" not in err
    assert deterministic(read_metrics(fork)) == deterministic(read_metrics(parent))[2:]
    assert chains(fork) == {step: chain for step, chain in chains(parent).items() if step > 2}
    assert_same_weights(fork, parent)
    history = json.loads((fork / "summary.json").read_text())["history"]
    assert history == [{"step": 2, "key": "run_dir", "before": str(parent), "now": str(fork)}]


def test_a_changed_fork_equals_its_parent_up_to_the_first_step_that_the_change_touches(
    rl_config: Config, spurline: Spurline, noise: Callable[[], None]
) -> None:
    parent = Path(train(recorded(rl_config, steps=4)).run_dir)
    fork, hotter = parent.with_name("fork"), parent.with_name("hotter")
    noise()
    code, _, err = spurline("fork", f"{parent}@2", "--set", "loss.clip_high=0.0001", "--run-dir", fork)
    assert code == 0, err
    then, now = (read_lineage(folder) for folder in (parent, fork))
    # Weights are the first thing that the loss touches. Before, even the rollouts are the same.
    assert {name for name in then[3] if then[3][name] != now[3][name]} == {"weights_after", "chain"}
    assert now[4]["weights_before"] == now[3]["weights_after"]
    assert now[4]["rows"] == then[4]["rows"]
    assert now[4]["rollouts"] != then[4]["rollouts"]
    assert "From step 4 on, rollouts are generated" in err
    assert "rewards are those that" in err
    # Damaged rollouts are not trained on. Without the rollouts of the parent, noise comes first.
    kept = parent / "rollouts" / "step-000003.parquet"
    flipped(kept, 100)
    code, _, err = spurline("fork", f"{parent}@2", "--steps", 3, "--run-dir", parent.with_name("damaged"))
    assert code == 0, err
    assert "step-000003.parquet has changed since it was written" in err
    kept.unlink()
    code, _, err = spurline("fork", f"{parent}@2", "--steps", 3, "--run-dir", parent.with_name("noisy"))
    assert code == 0, err
    assert "kept none of them whole" in err
    assert read_lineage(parent.with_name("noisy"))[3]["rollouts"] != then[3]["rollouts"]
    # A setting that shapes rollouts is the cause itself.
    hot = ("--set", "source.sampling.temperature=1.5", "--steps", 3)
    assert spurline("fork", f"{parent}@2", *hot, "--run-dir", hotter)[0] == 0
    assert read_lineage(hotter)[3]["rollouts"] != then[3]["rollouts"]


def test_a_fork_generates_where_its_parent_went_on_with_other_settings(
    rl_config: Config, spurline: Spurline, noise: Callable[[], None]
) -> None:
    config = recorded(rl_config, steps=3)
    train(config)
    hot = {**config["source"], "sampling": {**config["source"]["sampling"], "temperature": 1.5}}
    parent = Path(train(config, steps=4, source=hot, allow_change=["source.sampling"]).run_dir)
    fork = parent.with_name("fork")
    noise()
    code, _, err = spurline("fork", f"{parent}@2", "--steps", 4, "--run-dir", fork)
    assert code == 0, err
    then, now = (read_lineage(folder) for folder in (parent, fork))
    assert now[3]["chain"] == then[3]["chain"]
    assert now[4]["rollouts"] != then[4]["rollouts"]
    assert "From step 4 on, rollouts are generated" in err
    # Without the checkpoint at the change, later ones do not tell the settings of the steps before it.
    shutil.rmtree(parent / "checkpoints" / "step-00000003")
    code, _, err = spurline("fork", f"{parent}@2", "--run-dir", parent.with_name("other"))
    assert code == 2
    assert "source.sampling.temperature was changed after step 3" in err


def test_a_fork_may_change_what_a_resume_refuses_but_not_what_its_checkpoint_does_not_fit(
    base_config: Config, spurline: Spurline
) -> None:
    parent = Path(train(recorded(base_config, steps=4)).run_dir)
    fork, other = parent.with_name("fork"), parent.with_name("other")
    words = ("fork", f"{parent}@2", "--set", "loss=dft", "--steps", 3, "--run-dir", fork)
    code, _, err = spurline(*words)
    assert code == 0, err
    assert [line["step"] for line in read_metrics(fork)] == [3]
    # The same command goes on with a fork. It has nothing to do here, unless it asks for more steps.
    assert "Nothing to do" in spurline(*words)[1]
    assert spurline(*words[:-4], "--steps", 4, "--run-dir", fork)[0] == 0
    assert [line["step"] for line in read_metrics(fork)] == [3, 4]
    code, _, err = spurline("fork", f"{parent}@2", "--set", "optimizer=sgd", "--run-dir", other)
    assert code == 2
    assert "optimizer" in err
    assert not other.exists(), "the corrected command can use it"
    code, _, err = spurline("fork", f"{parent}@3", "--run-dir", other.with_name("third"))
    assert code == 2
    assert "Steps with a checkpoint: 2, 4." in err
    code, _, err = spurline("fork", f"{parent}@4", "--run-dir", fork)
    assert code == 2
    assert "is no fork of" in err


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
    # So few rows that five steps draw all of them.
    data.write_text("".join(Path(config["data"]["train"]).read_text().splitlines(keepends=True)[:16]))
    config["data"] = {**config["data"], "train": str(data)}
    run_dir = Path(train(config).run_dir)
    assert spurline("verify", run_dir)[:2] == (
        0,
        "Equal: steps 5 to 5 were recomputed, and the record of steps 1 to 5 fits together.\n",
    )
    (tmp_path / "elsewhere").mkdir()
    data = data.rename(tmp_path / "elsewhere" / data.name)
    moved = ("--set", f"data.train={data}")
    code, out, _ = spurline("verify", run_dir, "--step", 4, "--from", "start", *moved)
    assert (code, out) == (0, "Equal: steps 1 to 4 were recomputed, and the record of steps 1 to 5 fits together.\n")

    if kind == "rollouts":
        kept = run_dir / "rollouts/step-000003.parquet"
        flipped(kept, 1000)
        code, out, _ = spurline("verify", run_dir, *moved)
        assert (code, out.splitlines()[0]) == (
            1,
            "step 3: rollouts/step-000003.parquet: the content of the file has changed",
        )
        kept.unlink()

    # A weight of the checkpoint, first as a disk would flip it, and then with a digest that fits.
    weights = run_dir / "checkpoints/step-00000002/backend/model.safetensors"
    flipped(weights, -5)
    code, out, _ = spurline("verify", run_dir, "--step", 3, *moved)
    assert code == 1
    assert out.startswith("step 2: checkpoint:")
    assert "model.safetensors is damaged" in out
    manifest = weights.parents[1] / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["backend/model.safetensors"]["xxh3"] = digest_file(weights).xxh3
    manifest.write_text(json.dumps(content))
    code, out, _ = spurline("verify", run_dir, "--step", 3, *moved)
    assert code == 1
    assert out.startswith("step 3: weights before:")

    # A letter of a row of the data.
    flipped(data, data.read_bytes().index(b'"content": "') + len('"content": "'))
    code, out, _ = spurline("verify", run_dir, *moved)
    assert code == 1
    assert out.startswith("step 5: rows:")
    code, out, _ = spurline("verify", run_dir, "--from", "start", *moved)
    assert code == 1
    assert ": rows:" in out
    assert [path.name for path in run_dir.iterdir() if path.name == "again"] == []


def test_a_fork_and_verify_use_the_settings_after_a_change_and_leave_the_parents_files_alone(
    base_config: Config, spurline: Spurline
) -> None:
    config = recorded(base_config, steps=4)
    train(config)
    changed = config["optimizer"] | {"learning_rate": 0.02}
    parent = Path(train(config, steps=6, optimizer=changed, allow_change=["optimizer"]).run_dir)
    weights = parent / "checkpoints/step-00000004/backend/model.safetensors"
    weights.chmod(0o444)
    fork = parent.with_name("fork")
    code, _, err = spurline("fork", f"{parent}@4", "--run-dir", fork)
    assert code == 0, err
    assert chains(fork) == {step: chain for step, chain in chains(parent).items() if step > 4}
    # A verify that was killed has left links.
    killed = parent / "again/scratch-killed/run/run.lock"
    killed.parent.mkdir(parents=True)
    killed.touch()
    code, out, err = spurline("verify", parent)
    assert (code, out.split(",")[0]) == (0, "Equal: steps 5 to 6 were recomputed"), err
    assert not killed.exists()
    assert weights.stat().st_mode & 0o777 == 0o444
    code, _, err = spurline("verify", parent, "--from", weights.parents[2] / "step-00000002")
    assert code == 2
    assert "optimizer.learning_rate was changed after step 4" in err


def test_verify_names_what_it_has_compared_and_reads_each_checkpoint(base_config: Config, spurline: Spurline) -> None:
    config = recorded(base_config, steps=4, schedule="constant", lineage={"weights_every_steps": 3})
    run_dir = Path(train(config).run_dir)
    code, out, err = spurline("verify", run_dir)
    assert code == 0, err
    assert out.endswith("Weights were recorded, and compared, after 1 of the 2 steps.\n")
    # Nothing is said about equality if the steps cannot be recomputed.
    code, out, err = spurline("verify", run_dir, "--set", "optimizer=sgd")
    assert (code, out) == (2, "")
    assert "optimizer" in err

    record, newest = run_dir / "lineage.jsonl", run_dir / "checkpoints/step-00000004/backend/model.safetensors"
    lines = record.read_bytes()
    record.write_bytes(lines.splitlines(keepends=True)[0])
    code, out, _ = spurline("verify", run_dir)
    assert code == 1
    assert "step 2: record: lineage.jsonl has another chain up to step 2 than" in out
    record.write_bytes(lines)
    flipped(newest, -5)
    code, out, _ = spurline("verify", run_dir, "--step", 2)
    assert code == 1
    assert out.startswith("step 4: checkpoint:")
    flipped(newest, -5)

    # The settings of the only checkpoint that is left have no lineage.
    config = {**config, "plugins": [name for name in config["plugins"] if name != "lineage"]}
    del config["lineage"]
    train(config, steps=6, allow_change=["plugins"])
    for step in (2, 4):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    code, out, err = spurline("verify", run_dir, "--from", "start")
    assert (code, out.split(",")[0]) == (0, "Equal: steps 1 to 4 were recomputed"), err


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_backend_that_lends_no_parameters_has_the_same_hash(spurline_tiny_model: Path, lora: Config | None) -> None:
    backend = excite(local_backend(spurline_tiny_model, lora=lora))
    parts = ("named_weights", "adapter_settings", "named_adapter_weights")
    assert policy_hash(SimpleNamespace(**{part: getattr(backend, part) for part in parts})) == policy_hash(backend)


@pytest.mark.processes
def test_ranks_have_the_chain_of_one_process_and_forks_and_shares_as_there(
    rl_config: Config, spurline: Spurline, noise: Callable[[], None]
) -> None:
    config = recorded(rl_config, steps=2, checkpoint={"every_steps": 1, "keep_last": 9})
    config["backend"] = {**config["backend"], "sums": "reproducible"}
    local = Path(train(config, name="local").run_dir)
    sharded = Path(train(on_ranks(config, sums="reproducible"), name="ranks").run_dir)
    assert chains(sharded) == chains(local)
    noise()
    fork = sharded.with_name("fork")
    code, _, err = spurline("fork", f"{sharded}@1", "--run-dir", fork)
    assert code == 0, err
    assert chains(fork) == {2: chains(local)[2]}
    one, other = ({part.uid: share for share, part in blame_step(run_dir, 2).shares()} for run_dir in (local, sharded))
    assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["rows of data", "rollouts with a critic"])
def test_reproducible_sums_have_one_chain_in_all_layouts(
    kind: str, spurline: Spurline, request: pytest.FixtureRequest
) -> None:
    config = recorded(request.getfixturevalue("base_config" if kind == "rows of data" else "rl_config"), steps=4)
    if kind == "rollouts with a critic":
        config |= {"source": {**config["source"], "advantage": "gae"}, "critic": {"optimizer": {"learning_rate": 1e-3}}}
    config["backend"] = {**config["backend"], "sums": "reproducible"}
    ranks = on_ranks(config, sums="reproducible")
    local, sharded = (Path(train(each, name=name).run_dir) for each, name in ((config, "local"), (ranks, "ranks")))
    assert chains(local) == chains(sharded)
    # A checkpoint fits other numbers of ranks. Other backends begin at step 1.
    for run_dir, words in (
        (sharded, ["--set", "backend.ranks=1"]),
        (local, ["--from", "start", *settings(plugins=ranks["plugins"], backend=ranks["backend"])]),
        (sharded, ["--from", "start", *settings(backend=config["backend"])]),
    ):
        code, out, err = spurline("verify", run_dir, *words)
        assert (code, out.split(":")[0]) == (0, "Equal"), out + err


def settings(**values: Any) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.mark.processes
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_verify_passes_on_a_run_that_was_killed(
    kills: int, base_config: Config, killable_process: Callable[..., KillableProcess], spurline: Spurline
) -> None:
    steps = 4 * kills
    config = recorded(base_config, steps=steps)
    whole = train(config, name="whole")
    instants = random.Random(3)
    for _ in range(kills):
        process = killable_process(config)
        process.wait_for_steps(instants.randint(1, 2), instants.uniform(0, 0.02))
        process.kill()
    run_dir = Path(train(config).run_dir)
    assert chains(run_dir) == chains(whole.run_dir)
    code, out, _ = spurline("verify", run_dir, "--from", "start")
    assert (code, out.split(",")[0]) == (0, f"Equal: steps 1 to {steps} were recomputed")


SGD = {"name": "sgd", "learning_rate": 0.01, "max_grad_norm": None}


@pytest.mark.parametrize("kind", ["rows of data", "pairs", "rollouts"])
def test_shares_of_an_update_add_up_to_one_and_the_largest_is_what_is_missing_without_its_group(
    kind: str, spurline: Spurline, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = request.getfixturevalue("rl_config" if kind == "rollouts" else "base_config")
    config = recorded(config, steps=3, optimizer=SGD, schedule="constant")
    if kind == "rollouts":
        # An advantage of a group does not depend on other groups, so all mini-batches can be compared.
        config["minibatches"] = {"name": "by_prompt", "prompts_per_minibatch": 4}
    if kind == "pairs":
        pairs = write_pairs(tmp_path / "pairs.jsonl", 16, 3)
        config |= {"source": "preference", "loss": "dpo", "data": {"train": str(pairs), "max_length": 128}}
    run_dir = Path(train(config).run_dir)
    code, out, err = spurline("blame", run_dir, "--step", 3, "--top", 2)
    assert code == 0, err
    assert out.index("largest shares:") < out.index("smallest shares:")
    [viewed] = ViewedRun(run_dir, "run").shares()["steps"]
    tokens, gradients = [], LocalBackend.gradients
    with monkeypatch.context() as counted:

        def counting(self: LocalBackend, batch: Any, *words: Any, **named: Any) -> Any:
            tokens.append(batch.num_tokens)
            return gradients(self, batch, *words, **named)

        counted.setattr(LocalBackend, "gradients", counting)
        # An engine would now sample other tokens than in the run.
        counted.setattr(policy, "derive_seed", lambda *_: 3)
        shares = blame_step(run_dir, 3).shares()
    # All groups together cost one more pass over the step.
    assert len(tokens) > len(shares)
    if kind != "rollouts":
        assert sum(tokens[1:]) <= tokens[0]
    assert sum(share for share, _ in shares) == pytest.approx(1, abs=1e-6)
    share, largest = shares[0]
    assert largest.text
    assert f"{share:+.4f}  {largest.uid}" in out
    # The page shows what the command has printed, with whole texts.
    assert (viewed["step"], viewed["num_groups"]) == (3, len(shares))
    assert [group["uid"] for group in viewed["groups"]] == [part.uid for _, part in (*shares[:2], *shares[-2:])]
    assert viewed["groups"][0]["text"] == largest.text
    assert viewed["groups"][0]["rewards"] == [*largest.rewards]

    class Without:
        """Makes the update without the loss of one group, after the real normaliser was computed."""

        @hookimpl
        def on_run_start(self, run: Any) -> None:
            update = run.backend.update

            def without(batch: Any, objective: Any, *, role: str = "policy") -> Any:
                for uid, alone in groups_alone(batch):
                    if uid == largest.uid and self.step == 3:
                        own = alone.tokens["loss_weights"] != 0
                        rows = torch.isin(batch.unit_ids, alone.unit_ids)
                        weights = batch.tokens["loss_weights"].clone()
                        weights[rows] = torch.where(own, 0.0, weights[rows])
                        batch = batch.with_tokens(loss_weights=weights)
                return update(batch, objective, role=role)

            run.backend.update = without

        @hookimpl
        def on_step_start(self, step: int) -> None:
            self.step = step

    other = train(config, Without(), name="without")
    before, whole, changed = (
        load_file(path / "backend/model.safetensors")
        for path in (
            run_dir / "checkpoints/step-00000002",
            run_dir / "checkpoints/step-00000003",
            other.run_dir / "checkpoints/step-00000003",
        )
    )
    moved = torch.cat([(whole[name] - before[name]).double().flatten() for name in whole])
    left = torch.cat([(changed[name] - before[name]).double().flatten() for name in whole])
    assert float(left @ moved / (moved @ moved)) == pytest.approx(1 - share, abs=2e-3)


def test_a_step_whose_evaluation_failed_has_its_line_after_the_resume(
    base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recorded(base_config, steps=4, evaluation={"every_steps": 3})
    config["data"] = {**config["data"], "eval": config["data"]["train"]}
    whole = train(config, name="whole")
    with monkeypatch.context() as broken:
        broken.setattr(DataEvaluation, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    assert list(chains(config["run_dir"])) == [1, 2]
    assert chains(train(config).run_dir) == chains(whole.run_dir)
