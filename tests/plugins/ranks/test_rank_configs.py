"""What the settings of a backend with ranks say to the processes."""

from __future__ import annotations

from typing import Any

import pytest

from spurline_ranks.configs import RankBackendConfig

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def variables(**settings: Any) -> dict[str, str]:
    request = RankBackendConfig(name="any", ranks=2, device="cpu", **settings).rank_request()
    assert request is not None
    return dict(request.variables)


def test_deterministic_ranks_have_a_workspace_for_products_unless_one_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    assert variables() == {}
    assert variables(deterministic=True) == {WORKSPACE: ":4096:8"}
    monkeypatch.setenv(WORKSPACE, ":16:8")
    assert variables(deterministic=True) == {WORKSPACE: ":16:8"}
