"""A pipeline whose controller is interrupted or killed: the step is finished and saved, or nothing is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from every_run import SOAK
from failing_losses import installed
from rank_interrupts import (
    Spurline,
    WriteConfig,
    assert_a_second_one_ends_it_at_once,
    assert_the_step_is_finished_and_saved,
)
from run_helpers import on_ranks, read_metrics

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not SOAK, reason="runs of any ranks end alike; SPURLINE_SOAK=1"),
]

PIPELINE = {"backend": "megatron", "pipeline": 2}


@pytest.fixture
def failing(base_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config of a run whose last stage fails in its third step, after a checkpoint. Called with how."""

    def make(how: str) -> dict[str, Any]:
        changed = base_config | {"plugins": ["failing_losses"], "loss": {"name": "fails", "how": how}}
        # Only this stage computes a loss, once per step.
        return on_ranks(changed, **PIPELINE, max_tokens_per_microbatch=2048)

    with installed(tmp_path / "site", monkeypatch):
        yield make


def test_ctrl_c_finishes_the_step_of_a_pipeline_and_saves_it(
    base_config: dict[str, Any], write_config: WriteConfig, spurline: Spurline, tmp_path: Path
) -> None:
    changes = on_ranks(base_config, **PIPELINE, max_tokens_per_microbatch=256)
    assert_the_step_is_finished_and_saved(changes, write_config, spurline, tmp_path)


def test_a_second_ctrl_c_ends_a_pipeline_at_once_whose_first_stage_waits_for_gradients(
    failing: Any, write_config: WriteConfig, tmp_path: Path
) -> None:
    assert_a_second_one_ends_it_at_once(failing("sleep"), write_config, tmp_path)


def test_a_killed_stage_is_named_and_how_to_go_on(spurline: Spurline, write_config: WriteConfig, failing: Any) -> None:
    changes = failing("kill")
    config = write_config(changes)
    code, _, err = spurline("train", config)
    assert code == 1
    assert "ank 1 of 2 (process " in err
    assert "was killed by SIGKILL, as the system does when memory runs out, during `update`" in err
    saved = Path(changes["run_dir"]) / "checkpoints/step-00000002"
    assert f"The last checkpoint is {saved}. Go on with: spurline train {config}" in err
    assert len(read_metrics(changes["run_dir"])) == 2
