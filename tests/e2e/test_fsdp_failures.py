"""What a user sees when a rank of a run fails, and that Ctrl-C finishes the step with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from failing_losses import installed
from rank_interrupts import (
    Spurline,
    WriteConfig,
    assert_a_second_one_ends_it_at_once,
    assert_the_step_is_finished_and_saved,
)
from run_helpers import on_ranks, read_metrics

pytestmark = pytest.mark.processes


@pytest.fixture
def failing(base_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config of a run whose rank 1 fails in its third step, after a checkpoint. Called with how, and settings of the
    backend."""

    def make(how: str, **backend: Any) -> dict[str, Any]:
        config = on_ranks(base_config | {"plugins": ["failing_losses"], "loss": {"name": "fails", "how": how}})
        return config | {"backend": config["backend"] | backend}

    with installed(tmp_path / "site", monkeypatch):
        yield make


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("value", 1, r"failed during `update`: ValueError: broken on purpose"),
        ("kill", 1, r"was killed by SIGKILL, as the system does when memory runs out, during `update`"),
        ("data", 2, r"rows.jsonl:3: prompt is empty. Remove the row."),
    ],
)
def test_the_rank_that_failed_is_named_and_how_to_go_on(
    spurline: Spurline, write_config: WriteConfig, failing: Any, how: str, code: int, said: str
) -> None:
    config = write_config(failing(how))
    began = psutil.Process().children(recursive=True)
    result, _, err = spurline("train", config)
    assert result == code
    assert said in err
    assert "ank 1 of 2 (process " in err
    assert ("Traceback" in err) == (how == "value")
    assert ("in _raises_a_value_error" in err) == (how == "value")
    run_dir = Path(failing(how)["run_dir"])
    go_on = f"The last checkpoint is {run_dir}/checkpoints/step-00000002. Go on with: spurline train {config}"
    assert (go_on in err) == (how != "data"), "an error of ours says itself what to do"
    assert len(read_metrics(run_dir)) == 2
    # The process that they are forked from stays for the next ones.
    left = set(psutil.Process().children(recursive=True)) - set(began)
    assert len(left) <= 1


def test_a_rank_that_stands_still_is_named_with_its_stack(
    spurline: Spurline, write_config: WriteConfig, failing: Any
) -> None:
    code, _, err = spurline("train", write_config(failing("sleep", call_timeout_s=3)))
    assert code == 1
    assert "`update` was not done within 3 s, its limit by backend.call_timeout_s" in err
    assert "rank 1 of 2" in err
    assert "micro-batch 1 of 1" in err
    assert "in _stands_still" in err.partition("Stack of rank 1:")[2]


def test_ctrl_c_in_a_terminal_finishes_the_step_and_saves_it(
    base_config: dict[str, Any], write_config: WriteConfig, spurline: Spurline, tmp_path: Path
) -> None:
    assert_the_step_is_finished_and_saved(on_ranks(base_config), write_config, spurline, tmp_path)


def test_a_second_ctrl_c_ends_a_step_that_stands_still_at_once(
    failing: Any, write_config: WriteConfig, tmp_path: Path
) -> None:
    assert_a_second_one_ends_it_at_once(failing("sleep"), write_config, tmp_path)
