"""Engines that answer every update as if all was well, and generate with other weights than they claim."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once, asynchronous
from child_engines import engines_of
from every_run import IN_LONG_RUNS
from run_helpers import Config, on_ranks, read_metrics, train
from sabotages import KINDS, PREFIX_CACHE, first_broken

from spurline.errors import RunFailedError
from spurline.run.checkpoints.state_files import read_state
from spurline_async_rl.engines import child_process
from spurline_async_rl.source.recordings import groups_of, recorded_step
from spurline_concurrency.child import ChildProcess
from spurline_models.testing.inputs import write_tiny_model
from spurline_rl.trajectory import turns_of

pytestmark = pytest.mark.processes

LORA = {"rank": 4}
BACKENDS: dict[str, Config] = {
    "full": {},
    "adapters": {"backend": {"lora": LORA}},
    "fsdp": on_ranks({}),
    "fsdp adapters": on_ranks({}, lora=LORA),
}
IN_CI = (("head", "full"), ("keys in flight", "full"), ("late", "adapters"), ("frozen", "fsdp"))


def sabotages() -> Iterator[Any]:
    """Yield each kind with each backend. The engine shares no prefixes, and adapters do not change the head."""
    for kind, backend in itertools.product(KINDS, BACKENDS):
        if kind != PREFIX_CACHE and not (kind == "head" and "adapters" in backend):
            yield pytest.param(kind, backend, marks=() if (kind, backend) in IN_CI else IN_LONG_RUNS)


@pytest.fixture
def proven_config(rl_config: Config) -> Config:
    """An asynchronous run with two child processes, which records what it trains on."""
    config = asynchronous(
        rl_config | {"steps": 5, "report": {"enabled": False}},
        correction="tis",
        max_staleness=2,
        max_concurrent_groups=4,
        record_groups=True,
        engine={"name": "child_process", "engines": 2},
    )
    config["optimizer"]["learning_rate"] = 2e-3
    return config


def sabotage(monkeypatch: pytest.MonkeyPatch, kind: str, *, engines: str = "0", always: bool = False) -> None:
    """Break the updates of these engines; with `always`, of their replacements too."""
    started: set[str] = set()

    def start(module: str, *, log: Path, environment: dict[str, str], **more: Any) -> ChildProcess:
        number = log.stem.removeprefix("engine-")
        if number in engines and (always or number not in started):
            # The first update of a replacement has a later version.
            first = 0 if number in started else first_broken(kind)
            module, environment = "sabotaged_child", {**environment, "SABOTAGE": f"{kind}@{first}"}
        started.add(number)
        return ChildProcess(module, log=log, environment=environment, **more)

    monkeypatch.setattr(child_process, "ChildProcess", start)


def trained_by(config: Config) -> dict[str, set[int]]:
    """Return the versions of the tokens that were trained on, by the engine that made them."""
    found: dict[str, set[int]] = {}
    for line in read_metrics(config["run_dir"]):
        for group in groups_of(read_state(recorded_step(Path(config["run_dir"]), line["step"]))):
            for turn in turns_of([group]):
                assert turn.versions is not None
                for engine in turn.engines:
                    found.setdefault(engine, set()).update(turn.versions.tolist())
    return found


def test_honest_engines_are_proven_at_every_publish(proven_config: Config) -> None:
    lines = train(proven_config).lines
    assert [line["publish/rejected"] for line in lines] == [0.0] * len(lines)
    assert all(line["publish/probe_diff"] < 1e-4 for line in lines)
    # It is unknown after a publish that changes the first token of the answer.
    delivered = [line["publish/delivered"] for line in lines if "publish/delivered" in line]
    assert len(delivered) >= (len(lines) - 2) / 2
    assert all(0.99 < share < 1.01 for share in delivered)
    assert all(engine.startswith("engine ") for engine in trained_by(proven_config))


@pytest.mark.parametrize(("kind", "backend"), [*sabotages()])
def test_an_engine_with_other_weights_is_replaced_and_none_of_its_tokens_is_trained_on(
    kind: str,
    backend: str,
    proven_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = "01" if kind == "all frozen" else "0"
    sabotage(monkeypatch, kind, engines=broken)
    proven_config["plugins"] = [*proven_config["plugins"], *BACKENDS[backend].get("plugins", ())]
    proven_config["backend"] = {**proven_config["backend"], **BACKENDS[backend].get("backend", {})}
    if kind == "head":
        tied = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
        proven_config["model"] = {**proven_config["model"], "path": str(tied)}
    lines = train(proven_config).lines
    # A step reports the proof of the publish before it.
    [(version, rejected)] = [(line["step"] - 1, line["publish/rejected"]) for line in lines if line["publish/rejected"]]
    # Whether the request that crosses an update is still under way then is up to the clock.
    assert version - first_broken(kind) in ((0, 1) if kind == "keys in flight" else (0,))
    assert rejected == len(broken)
    err = capfd.readouterr().err
    said = f" does not generate with the weights of version {version}"
    engines = sorted(line.partition(said)[0] for line in err.splitlines() if said in line)
    assert "An engine has died" not in err
    assert [engine.partition(" (process ")[0] for engine in engines] == [f"engine {number}" for number in broken]
    trained = trained_by(proven_config)
    assert all(max(trained[engine], default=0) < version for engine in engines)
    assert_every_prompt_ended_once(proven_config)
    assert engines_of(os.getpid()) == []


def test_a_run_ends_when_the_replacement_has_other_weights_too(
    proven_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, "other model", engines="01", always=True)
    with pytest.raises(RunFailedError, match=r"engine \d .*started again for the same reason.*on_undelivered"):
        train(proven_config)
    versions = set().union(*trained_by(proven_config).values())
    assert max(versions) < first_broken("other model")
    assert engines_of(os.getpid()) == []


@pytest.mark.parametrize("choice", ["stop", "warn"])
def test_a_broken_engine_ends_the_run_or_is_only_told_of_as_the_config_says(
    choice: str, proven_config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kind = "all frozen"
    broken_at = first_broken(kind)
    sabotage(monkeypatch, kind, engines="01")
    proven_config["source"]["proof"] = {"on_undelivered": choice}
    if choice == "stop":
        with pytest.raises(RunFailedError, match=rf"engine \d .*weights of version {broken_at}.*on_undelivered: warn"):
            train(proven_config)
        assert len(read_metrics(proven_config["run_dir"])) == broken_at
        return
    lines = train(proven_config).lines
    assert [line["publish/rejected"] for line in lines] == [0.0] * broken_at + [2.0] * (len(lines) - broken_at)
    assert "Its tokens are trained on nevertheless" in capfd.readouterr().err


def test_proofs_can_be_turned_off(proven_config: Config) -> None:
    proven_config["source"]["proof"] = {"every": 0}
    assert not any(name.startswith("publish/") for line in train(proven_config).lines for name in line)
