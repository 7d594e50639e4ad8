"""The gate on gradients is as strict as rounding allows."""

from __future__ import annotations

import pytest
import torch

from spurline_rl.testing.backend_cases import assert_gradients_close


def test_gradients_that_cancel_are_judged_by_their_rounding_and_all_others_by_themselves() -> None:
    # Rounding of float32 is 1.2e-7; the largest gradient is 2.
    large, small, cancelled = torch.tensor([2.0]), torch.tensor([1e-2]), torch.tensor([0.0])
    expected = {"large": large, "small": small, "cancelled": cancelled}
    assert_gradients_close(expected | {"cancelled": cancelled + 1e-6}, expected, 3e-6)
    for wrong in ({"cancelled": cancelled + 3e-6}, {"small": small + 3e-6}, {"large": large * 1.00001}):
        with pytest.raises(AssertionError, match=next(iter(wrong))):
            assert_gradients_close(expected | wrong, expected, 3e-6)
