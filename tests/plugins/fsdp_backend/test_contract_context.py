"""Ranks that share each sequence compute what the local backend computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsdp_layouts import on

from spurline.errors import ConfigError, ModelError
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.protocols.ranks import RankRequest
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks
from spurline_ranks.messages import plain_run
from spurline_rl.losses.algorithms import Gspo
from spurline_rl.losses.configs import GspoConfig
from spurline_rl.testing import BackendContract
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch, with_noisy_columns
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes


Pair = tuple[Backend, Backend, ParallelLayout]


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
    backend_settings = on(4, context=2, max_tokens_per_microbatch=40, activation_checkpointing=True)
    keeps_open = True
    in_every_run = ()


def _pair(model: Path, *, critic: bool = True, **settings: Any) -> Iterator[Pair]:
    shared = backend_run(model, on(**settings), ("fsdp_backend",), critic=critic)
    alone = backend_run(model, {"name": "models/local", "device": "cpu"}, ("fsdp_backend",), critic=critic)
    with opened(shared) as (backend, layout), opened(alone) as (local, _):
        yield backend, local, layout


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers alternate between full attention and a window that the sequences are longer than."""
    return write_tiny_model(
        tmp_path_factory.mktemp("windowed"),
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )


@pytest.fixture(scope="module")
def pair(windowed_model: Path) -> Iterator[Pair]:
    """Two ranks that share sequences, cut into micro-batches of which some leave a rank without loss."""
    yield from _pair(windowed_model, ranks=2, context=2, max_tokens_per_microbatch=24, logits_chunk_tokens=5)


def test_a_loss_on_whole_sequences_with_entropy_and_sliding_windows_gives_the_gradients_of_one_process(
    pair: Pair,
) -> None:
    shared, local, layout = pair
    batch = with_noisy_columns(minibatch("packed", layout)[0])
    objective = Objective(Gspo(GspoConfig(entropy_coefficient=0.1)), 40.0, 0.7)
    assert_gradients_close(shared.gradients(batch, objective), local.gradients(batch, objective), 1e-5)
    got, wanted = shared.update(batch, objective), local.update(batch, objective)
    for name in ("loss", "grad_norm"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-6), name
    for name in ("policy/entropy", "policy/sequence_ratio/max", "policy/sequence_ratio"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert got["loss_tokens"] == wanted["loss_tokens"]


def test_ranks_share_a_stream_of_fewer_tokens_than_there_are_ranks(pair: Pair) -> None:
    shared, local, layout = pair
    batch, objective = minibatch("packed", layout, lengths=(2,))
    assert_gradients_close(shared.gradients(batch, objective), local.gradients(batch, objective), 1e-5)
    assert shared.evaluate(batch, objective).loss == pytest.approx(local.evaluate(batch, objective).loss, rel=1e-6)


def test_more_ranks_than_key_heads_repeat_them(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    for shared, local, layout in _pair(model, ranks=4, context=4):
        batch, objective = minibatch("packed", layout)
        assert_gradients_close(shared.gradients(batch, objective), local.gradients(batch, objective), 1e-5)


@pytest.mark.slow
def test_ranks_that_share_sequences_divide_experts_too(tmp_path: Path) -> None:
    model = write_tiny_moe_model(tmp_path / "model")
    for shared, local, layout in _pair(model, critic=False, ranks=4, context=2, expert=2):
        batch, objective = minibatch("packed", layout)
        assert_gradients_close(shared.gradients(batch, objective), local.gradients(batch, objective), 1e-5)


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
    mixing.call("check", False)
    with pytest.raises(ModelError, match=r"other log-probabilities when ranks share a sequence: .*context: 1"):
        mixing.call("check", True)
