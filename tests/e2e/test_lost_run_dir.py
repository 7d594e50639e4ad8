"""The run directory disappears while the run is going on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spurline import Run, load_config
from spurline.errors import RunDirectoryLostError
from spurline.plugins.hookspecs import hookimpl


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


@pytest.mark.parametrize("lose", [shutil.rmtree, replace])
def test_the_run_ends_with_a_sentence_and_writes_nothing_in_its_place(
    base_config: dict[str, Any], lose: Callable[[Path], object]
) -> None:
    run_dir = Path(base_config["run_dir"])
    loaded = load_config(base_config)

    class AtStepFour:
        @hookimpl
        def on_step_start(self, step: int) -> None:
            if step == 4:
                lose(run_dir)

    loaded.host.attach(AtStepFour(), "lose")
    with pytest.raises(RunDirectoryLostError) as raised:
        Run(loaded).train()
    assert str(raised.value) == (
        f"run_dir {run_dir} was removed or moved during the run. Put it back, or train the config again."
    )
    assert not hasattr(raised.value, "__notes__")
    assert not run_dir.exists() or not any(run_dir.iterdir())
    if lose is replace:
        run_dir.rmdir()
        run_dir.with_name("moved").rename(run_dir)
    assert Run(load_config(base_config)).train().step == 6
