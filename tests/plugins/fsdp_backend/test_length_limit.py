"""A sample over the length that a model can be trained on exactly is refused before a rank sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fsdp_layouts import on

from spurline.errors import DataError
from spurline_models.testing import write_tiny_model
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.processes
def test_ranks_stay_after_a_sample_that_is_too_long(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", rope_parameters=DYNAMIC, max_position_embeddings=16)
    loaded = backend_run(model, on(2, probe=False), ("fsdp_backend",))
    data = loaded.config.data.model_copy(update={"max_length": 16})
    loaded = replace(loaded, config=loaded.config.model_copy(update={"data": data}))
    with opened(loaded) as (backend, layout):
        for call in (backend.update, backend.gradients, backend.evaluate):
            with pytest.raises(DataError, match=r"17 tokens.*'dynamic'.*16"):
                call(*minibatch("packed", layout, lengths=(3, 17, 5, 9)))
        assert backend.update(*minibatch("packed", layout, lengths=(3, 16, 5, 9)))["tokens"] == 33
