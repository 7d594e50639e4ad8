"""The contract kit of text: test suites for datasets and tokenizations. `spurline.testing` explains how to use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.testing.lazy import lazy_names

if TYPE_CHECKING:
    from spurline_text.testing.dataset_contract import DatasetContract as DatasetContract
    from spurline_text.testing.tokenization_contract import TokenizationContract as TokenizationContract

_NAMES = {"dataset_contract": ("DatasetContract",), "tokenization_contract": ("TokenizationContract",)}

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
