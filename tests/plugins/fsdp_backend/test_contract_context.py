"""Ranks that share each sequence compute what the local backend computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsdp_layouts import on

from spurline.errors import ConfigError, ModelError
from spurline.protocols.ranks import RankRequest
from spurline_models.testing import write_tiny_model
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks
from spurline_ranks.messages import plain_run
from spurline_rl.testing import BackendContract
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes


class TestContext(BackendContract):
    """In every run what ranks that share sequences compute; they save, write and lend as others do."""

    plugins = ("fsdp_backend",)
    backend_settings = on(2, context=2)
    keeps_open = True
    in_every_run = (
        "loss_and_gradient_norm",
        "every_metric",
        "gradients_equal",
        "wrong_gradient_scale",
        "packed_and_padded",
        "narrow_or_wide",
        "alternate",
        "uneven_work",
        "temperature",
        "evaluation_sums",
        "temperature",
        "entropy",
        "critic_learns",
    )


@pytest.mark.slow
class TestDataAndContext(BackendContract):
    plugins = ("fsdp_backend",)
    backend_settings = on(4, context=2, max_tokens_per_microbatch=40, activation_checkpointing=0.5)
    keeps_open = True
    in_every_run = ()


def test_ranks_that_cannot_divide_the_heads_are_refused_before_any_is_started(spurline_tiny_model: Path) -> None:
    run = backend_run(spurline_tiny_model, on(3, context=3), ("fsdp_backend",))
    refused = pytest.raises(ConfigError, match=r"backend\.context is 3, which does not divide the 4 attention heads")
    with refused, opened(run):
        pass


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    run = backend_run(write_tiny_model(tmp_path_factory.mktemp("mixing")), on(2, context=2), ("fsdp_backend",)).config
    ranks = open_ranks(
        RankRequest(2, num_threads=1), "fsdp_ranks:MixingRank", (plain_run(run),), TimeLimits(120, 60, 60)
    )
    ranks.call("build")
    yield ranks
    ranks.close()


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused(mixing: RankGroup) -> None:
    mixing.call("check", 0.0, "fp32")
    mixing.call("check", 0.0, "bf16")
    with pytest.raises(ModelError, match=r"other log-probabilities when ranks share a sequence: .*context: 1"):
        mixing.call("check", 0.3, "bf16")
