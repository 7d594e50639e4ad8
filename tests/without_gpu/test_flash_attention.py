"""FlashAttention 3 computes attention where it is installed and fast, and the first lines of a run say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backend_batches import local_backend, write_model_folder
from torch.nn import attention

from spurline.errors import ConfigError
from spurline_models.device_profile import DeviceProfile, attention_library, has_flash_attention_3

HOPPER = (9, 0)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), HOPPER, (10, 0)])
def test_it_is_for_one_generation_of_gpus_and_only_where_installed(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_flash_attention_3(capability)
    Path(tmp_path, "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert has_flash_attention_3(capability) == (capability == HOPPER)


def test_it_is_activated_or_named_as_the_reason_why_a_run_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = DeviceProfile(torch.device("cuda"), torch.float32, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    cuda.use_fastest_attention()
    assert attention_library() == "", "it is not installed"
    Path(tmp_path, "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"FlashAttention 3, which is installed but does not load: .*kernels: none"):
        cuda.use_fastest_attention()
    library = torch.library.Library("flash_attn_3", "DEF")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor q) -> Tensor")
    cuda.use_fastest_attention()
    try:
        assert local_backend(write_model_folder(tmp_path / "model")).facts()["attention"] == "FA3"
    finally:
        attention.restore_flash_attention_impl()
    assert "attention" not in local_backend(tmp_path / "model").facts()
