"""Hold the tokens of one response so far, in few objects however long it is.

Place on the way: tokens of an engine, in chunks -> Progress -> result, or the next engine's prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline_rl.engines.in_process.response import ExpertRecord
from spurline_rl.trajectory import FinishReason

TokenIds = Sequence[int] | NDArray[np.int32]
Logprobs = Sequence[float] | NDArray[np.float32]


@dataclass(frozen=True)
class Delta:
    """The next tokens of a response; `finish_reason` is set with the last ones.

    `experts`, int16 [tokens, layers, top_k], are those of consecutive tokens of prompt and response, the first of which
    has index `experts_start`; None if vLLM was not asked for them.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason | None = None
    experts: NDArray[np.int16] | None = None
    experts_start: int = 0


class Progress:
    """The tokens of one response so far. The member adds to it while it generates, so that it survives the member.

    Its columns are those of GenerationResult, of one length, and reading one returns a copy. `experts` are those of the
    tokens computed so far, from the first token of the prompt that this engine was given.
    """

    def __init__(self) -> None:
        self.experts = ExpertRecord()
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._raw_logprobs: array[float] | None = array("f")
        self._version_runs: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def __repr__(self) -> str:
        return f"Progress({len(self)} tokens, versions {self._version_runs})"

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return np.array(self._token_ids, np.int32)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return np.array(self._logprobs, np.float32)

    @property
    def raw_logprobs(self) -> NDArray[np.float32] | None:
        """The model's own logprobs; None if an engine could not tell some of them."""
        return None if self._raw_logprobs is None else np.array(self._raw_logprobs, np.float32)

    @property
    def versions(self) -> NDArray[np.int32]:
        runs = np.array(self._version_runs, np.int32).reshape(-1, 2)
        return np.repeat(runs[:, 0], runs[:, 1])

    @property
    def version_runs(self) -> Sequence[tuple[int, int]]:
        """Pairs of version and number of tokens, in order; neighbours differ in version."""
        return self._version_runs

    @property
    def last_token(self) -> int | None:
        return self._token_ids[-1] if self._token_ids else None

    def tokens_from(self, start: int) -> Sequence[int]:
        """Return the token ids from this index on."""
        return self._token_ids[start:]

    def add(self, token_ids: TokenIds, logprobs: Logprobs, raw_logprobs: Logprobs | None, version: int) -> None:
        """Add the next tokens, all of one version. `raw_logprobs` are None if the engine cannot tell them."""
        count = len(token_ids)
        sizes = {count, len(logprobs), count if raw_logprobs is None else len(raw_logprobs)}
        assert len(sizes) == 1, f"columns of one chunk have {sizes} values"
        if not count:
            return
        _append(self._token_ids, token_ids)
        _append(self._logprobs, logprobs)
        self._note_raw(raw_logprobs)
        self._note_run(version, count)

    def extend(self, other: Progress) -> None:
        """Add all tokens of the next part of the response, without experts."""
        if not len(other):
            return
        self._token_ids.extend(other._token_ids)
        self._logprobs.extend(other._logprobs)
        self._note_raw(other._raw_logprobs)
        for version, count in other._version_runs:
            self._note_run(version, count)

    def cut(self, length: int) -> None:
        """Drop the tokens beyond this length."""
        excess = len(self) - length
        for column in (self._token_ids, self._logprobs, self._raw_logprobs):
            if column is not None:
                del column[length:]
        while excess > 0:
            version, count = self._version_runs.pop()
            if count > excess:
                self._version_runs.append((version, count - excess))
            excess -= count

    def _note_raw(self, more: Logprobs | None) -> None:
        if more is None:
            self._raw_logprobs = None
        elif self._raw_logprobs is not None:
            _append(self._raw_logprobs, more)

    def _note_run(self, version: int, count: int) -> None:
        runs = self._version_runs
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        else:
            runs.append((version, count))


def _append(column: array[Any], values: Sequence[Any] | NDArray[Any]) -> None:
    if isinstance(values, np.ndarray):
        # The type codes of both libraries mean the same C types.
        column.frombytes(values.astype(column.typecode, copy=False).tobytes())
    else:
        column.extend(values)
