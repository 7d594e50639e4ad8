"""Mixtures of datasets by weights and by shares."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from spurline.data.configs import UniformOrderConfig
from spurline.data.orders.epochs import UniformOrder
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.order import SampleFacts, epoch_shares
from spurline_text.tokenization import mix_notes, passes_per_epoch

mixtures = st.lists(st.tuples(st.integers(1, 200), st.floats(0.1, 5), st.booleans()), min_size=1, max_size=4)


@given(mixture=mixtures)
def test_shares_hold_in_each_epoch_to_a_sample_whatever_the_sizes_and_weights_divide_the_rest(
    mixture: list[tuple[int, float, bool]],
) -> None:
    sizes = [size for size, _, _ in mixture]
    shared = sum(share for _, share, has_share in mixture if has_share)
    complete = all(has_share for _, _, has_share in mixture)
    part = 1 if complete else 0.6
    datasets = [
        DatasetConfig(name="rows", share=number / shared * part)
        if has_share
        else DatasetConfig(name="rows", weight=number)
        for _, number, has_share in mixture
    ]
    passes = passes_per_epoch(datasets, sizes)
    amounts = [size * dataset.weight for size, dataset in zip(sizes, datasets, strict=True)]
    rest = sum(amount for amount, dataset in zip(amounts, datasets, strict=True) if dataset.share is None)
    for count, amount, dataset, once in zip(epoch_shares(sizes, passes), amounts, datasets, passes, strict=True):
        if shared == 0:
            assert once == dataset.weight
        else:
            share = amount / rest * 0.4 if dataset.share is None else dataset.share
            assert abs(count - share * sum(amounts)) <= 1


@given(mixture=mixtures, cut=st.integers(1, 50))
def test_a_mixture_by_shares_is_the_same_wherever_it_is_cut(mixture: list[tuple[int, float, bool]], cut: int) -> None:
    sizes, total = [size for size, _, _ in mixture], sum(share for _, share, _ in mixture)
    datasets = [DatasetConfig(name="rows", share=share / total) for _, share, _ in mixture]
    passes = passes_per_epoch(datasets, sizes)
    samples = SampleFacts(tuple(sizes), passes, 4, cast("Any", None))
    first, second = (UniformOrder(UniformOrderConfig(), samples=samples, seed=1) for _ in range(2))
    whole = first.positions(0, cut + 40).tolist()
    assert second.positions(0, cut).tolist() + second.positions(cut, cut + 40).tolist() == whole


def test_plans_say_how_often_a_dataset_with_a_share_comes_and_which_weights_were_rounded() -> None:
    def notes(**settings: float) -> list[str]:
        small = DatasetConfig.model_validate({"name": "rows", **settings})
        return mix_notes([DatasetConfig(name="rows"), small], [90, 10], ["large", "small"])

    assert notes(share=0.3) == [
        "large: 70 samples of an epoch, 0.778 times each of its 90",
        "small: 30 samples of an epoch, 3 times each of its 10",
    ]
    assert notes(weight=2) == []
    assert notes(weight=0.01) == [
        "small: 1 samples of an epoch, 0.1 times each of its 10 (its weight 0.01 is rounded to whole samples)"
    ]
