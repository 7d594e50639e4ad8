"""Answer the requests of lm-eval with the model that is trained.

Texts are turned into tokens as lm-eval's own `hf` model does. Logprobs come from the backend. Answers come from the
engine of the run's source, or else from the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jinja2
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from spurline.data.collators.layout import Segment, lay_out
from spurline.data.collators.packing import round_up
from spurline.errors import DataError
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_rl.protocols.rollout_engine import Sampling
from spurline_text.tokenizer import pad_token_id

_SHARPEST = 1e-6
"""Temperature at which the likeliest token has a probability of almost 1, so that logprobs say which token it is."""
_HALF = math.log(0.5)
_SAMPLED = ("temperature", "top_p", "top_k")

Question = tuple[list[int], Sampling]
"""Tokens to continue, and how."""


class TrainedModel(TemplateLM):
    """The model of a run, as lm-eval sees it.

    Args:
        answer: Returns the tokens of an answer to each question.
        max_length: Largest number of tokens of a text.
        max_new_tokens: Replaces the number of the tasks.
        reads_greedy: Whether any task reads whether a text is the likeliest one. If not, lm-eval is told that none is.

    Attributes:
        num_cut: Number of texts so far that lost their beginning.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        layout: ParallelLayout,
        answer: Callable[[Sequence[Question]], Sequence[Sequence[int]]],
        *,
        max_length: int,
        max_new_tokens: int | None,
        batch_size: int,
        reads_greedy: bool,
    ) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self.num_cut = 0
        self._trained, self._layout, self._answer = backend, layout, answer
        self._max_length, self._max_new_tokens, self._batch_size = max_length, max_new_tokens, batch_size
        self._reads_greedy = reads_greedy

    @property
    def eot_token_id(self) -> int:
        return pad_token_id(self.tokenizer) if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **chosen)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        options["continue_final_message"] = not add_generation_prompt
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except jinja2.TemplateError as error:
            raise DataError(
                f"The chat template refuses the conversation of a task: {error}. A template may know no system "
                "message, which a task's `description` and `system_instruction` make."
            ) from error

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the logprob of each text. A text beyond the limit is scored in windows."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            # The token before the window counts as one of the text, unlike in lm-eval's `hf` model.
            cut = get_rolling_token_windows(ids, self.prefix_token_id, self._max_length - 1, context_len=1)
            windows += [(number, *make_disjoint_window(window)) for window in cut]
        scores = self._loglikelihood_tokens([(("", ""), before, after) for _, before, after in windows])
        sums = [0.0] * len(requests)
        for (number, _, _), (score, _) in zip(windows, scores, strict=True):
            sums[number] += score
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = True, **_: Any
    ) -> list[tuple[float, bool]]:
        texts: list[Segment] = []
        for number, (texts_of, before, after) in enumerate(requests):
            if len(after) >= self._max_length:
                raise DataError(
                    f"The answer {texts_of[1][:80]!r} of a task has {len(after)} tokens, and with one token before it "
                    f"a text may have at most {self._max_length}. Raise max_length, or leave the task out."
                )
            ids = np.array(self._cut([*before, *after], self._max_length), np.int32)
            weights = np.zeros(len(ids), np.float32)
            weights[len(ids) - len(after) :] = 1
            texts.append(Segment(ids, weights, 0, str(number)))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(texts)
        # Texts of similar length share a batch.
        order = sorted(range(len(texts)), key=lambda number: -texts[number].length)
        for start in range(0, len(order), self._batch_size):
            members = order[start : start + self._batch_size]
            for number, score in zip(members, self._scores([texts[number] for number in members]), strict=True):
                found[number] = score
        return found

    def _scores(self, texts: Sequence[Segment]) -> list[tuple[float, bool]]:
        rows = [[text] for text in texts]
        rows += [[] for _ in range(round_up(len(rows), self._layout.data) - len(rows))]
        length = round_up(max(text.length for text in texts), self._layout.align_to)
        batch = lay_out(rows, length, pad_token_id(self.tokenizer))
        sums = self._trained.logprobs(batch).double().sum(1).tolist()
        if not self._reads_greedy:
            return [(score, False) for score in sums]
        # Two equally likely tokens have a logprob of `_HALF` each, and either counts as the likeliest.
        unlikely = self._trained.logprobs(batch, temperature=_SHARPEST) < _HALF - 1e-3
        return [(score, not missed) for score, missed in zip(sums, unlikely.any(1).tolist(), strict=True)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the text of each answer, up to the first of its stop texts."""
        questions = [self._question(*request.args) for request in requests]
        answers = self._answer(questions)
        return [
            postprocess_generated_text(
                self.tokenizer.decode(list(tokens), skip_special_tokens=True), list(sampling.stop), None
            )
            for (_, sampling), tokens in zip(questions, answers, strict=True)
        ]

    def _question(self, context: str, settings: dict[str, Any]) -> Question:
        given: dict[str, Any] = dict(normalize_gen_kwargs(settings))
        until, most = given.pop("until"), given.pop("max_gen_toks")
        most = self._max_new_tokens or most
        if unknown := given.keys() - {"do_sample", *_SAMPLED}:
            name = min(unknown)
            raise DataError(
                f"A task has the generation setting {name}: {given[name]}, which is not supported. Remove it from the "
                f"task's generation_kwargs. Settings: until, max_gen_toks, do_sample, {', '.join(_SAMPLED)}."
            )
        if most >= self._max_length:
            raise DataError(
                f"A task allows answers of {most} tokens, and question and answer together may have at most "
                f"{self._max_length}. Set max_new_tokens to less, or raise max_length."
            )
        drawn = {name: given[name] for name in _SAMPLED if name in given} if given.get("temperature") else {}
        stop = tuple(text for text in ([until] if isinstance(until, str) else until or ()) if text)
        sampling = replace(Sampling(temperature=0.0, max_new_tokens=most, stop=stop), **drawn)
        return self._cut(self.tok_encode(context) or [self.prefix_token_id], self._max_length - most), sampling

    def _cut(self, ids: list[int], most: int) -> list[int]:
        self.num_cut += len(ids) > most
        return ids[-most:]
