"""Check that a tokenization makes the same token store as the tokenization `text/sequential`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from spurline.config.run_config import DataConfig
from spurline.errors import DataError
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.tokenization import DatasetToTokenize, Tokenization
from spurline_text.testing.inputs import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ListDataset:
    """Rows from a Python list."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], label: str = "rows") -> None:
        self.label = label
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._rows[row]

    def location(self, row: int) -> str:
        return f"{self.label}.jsonl:{row + 1}"

    def fingerprint(self) -> str:
        return str(hash(repr(self._rows)))


class TokenizationContract:
    """A test suite for tokenizations: define `make_tokenization(tokenizer, data)` in a subclass.

    Most tests tokenize the chat rows in `rows`.
    """

    def make_tokenization(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Tokenization:
        """Return your tokenization."""
        raise NotImplementedError("subclass TokenizationContract with make_tokenization(self, tokenizer, data)")

    rows: Sequence[Mapping[str, Any]] = [
        {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "x" * (i + 1)}]}
        for i in range(30)
    ]

    def run(self, rows: Sequence[Mapping[str, Any]], **data: Any) -> Any:
        """Tokenize chat rows with these data settings."""
        config = DatasetConfig(name="rows", format="chat", on_bad_row=data.pop("on_bad_row", "error"))
        settings = DataConfig(train=(config,), **data)
        return self.make_tokenization(tiny_tokenizer(), settings).tokenize(
            [DatasetToTokenize(ListDataset(rows), config)]
        )

    def test_samples_keep_row_order_and_equal_the_reference(self) -> None:
        from spurline_text.configs import SequentialTokenizationConfig
        from spurline_text.tokenization import SequentialTokenization

        config = DatasetConfig(name="rows", format="chat")
        data = DataConfig(train=(config,))
        entry = [DatasetToTokenize(ListDataset(self.rows), config)]
        reference = SequentialTokenization(SequentialTokenizationConfig(), tokenizer=tiny_tokenizer(), data=data)
        expected = reference.tokenize(entry).store
        store = self.make_tokenization(tiny_tokenizer(), data).tokenize(entry).store
        assert store.row.tolist() == list(range(30))
        for name in ("tokens", "loss_mask", "offsets", "source", "row"):
            got, wanted = getattr(store, name), getattr(expected, name)
            assert got.dtype == wanted.dtype, name
            assert np.array_equal(got, wanted), name

    def test_the_trained_turn_includes_its_end_of_turn_token(self) -> None:
        tokenizer = tiny_tokenizer()
        view = self.run(self.rows[:1]).store.view(np.array([0]))
        trained = view.tokens(0)[view.loss_mask(0) == 1]
        assert tokenizer.decode(trained.tolist()) == "x<|im_end|>"

    @pytest.mark.parametrize("too_long", ["truncate", "drop"])
    def test_long_samples_are_cut_or_left_out_and_counted(self, too_long: str) -> None:
        result = self.run(self.rows, max_length=50, too_long=too_long)
        assert int(result.store.lengths().max()) <= 50
        assert result.truncated + sum(result.dropped.values()) > 0
        assert len(result.store) + sum(result.dropped.values()) == 30

    def test_a_malformed_row_is_an_error_that_names_it_or_skipped_and_counted(self) -> None:
        rows = [self.rows[0], {"text": "no messages"}]
        with pytest.raises(DataError, match=r"rows\.jsonl:2"):
            self.run(rows)
        result = self.run(rows, on_bad_row="skip")
        assert len(result.store) == 1
        assert sum(result.dropped.values()) == 1
