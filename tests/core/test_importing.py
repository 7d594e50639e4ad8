"""Nothing looks for garbage while libraries are imported, and everything does as before afterwards."""

from __future__ import annotations

import gc
import importlib
import logging

import pytest

from spurline.importing import importing


def test_the_collector_is_off_while_importing_and_on_again_also_after_an_error() -> None:
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), importing():
        importlib.import_module("no_such_module")
    assert gc.isenabled()


def test_what_torchao_says_of_itself_is_left_out_while_importing_alone(caplog: pytest.LogCaptureFixture) -> None:
    talker = logging.getLogger("torchao")
    with importing():
        talker.warning("a kernel for other GPUs does not load")
        talker.error("broken")
    talker.warning("said later")
    assert [record.message for record in caplog.records] == ["broken", "said later"]
