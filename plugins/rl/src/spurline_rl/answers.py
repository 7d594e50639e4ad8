"""Evaluation `answers`: generate greedy answers to held-out prompts, and score them with rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from spurline.data.token_store import fingerprint_of
from spurline.errors import DataError, RunFailedError
from spurline.protocols.backend import Backend
from spurline.protocols.dataset import Longest
from spurline.protocols.evaluation import EvaluationContext
from spurline.protocols.held_out import HeldOutEvaluation
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_models.abilities import Generates
from spurline_rl.evaluation_configs import AnswersEvaluationConfig
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.matching import check_reference
from spurline_rl.scoring import close_all, make_rewards, terms_of_all
from spurline_text.prompts import GenerationExample, question_key, read_examples
from spurline_text.sources.sft import note_of_shared
from spurline_text.tokenization import open_datasets, store_labels


class AnswersEvaluation(HeldOutEvaluation):
    """Generates and scores answers.

    Args:
        datasets: Datasets of prompts with answers. If None, the source or this class opens the datasets of the config.
    """

    def __init__(
        self,
        config: AnswersEvaluationConfig,
        context: EvaluationContext,
        datasets: Sequence[DatasetToTokenize] | None = None,
    ) -> None:
        self._config = config
        self._where = context.where
        self._tokenizer = context.run.tokenizer
        if datasets is None:
            # Some sources read held-out rows in their own format. If this source does, use its rows.
            own = context.source.held_out(config.data)
            registry = context.run.host.registry
            datasets = (
                own.answered() if own is not None else open_datasets(config.data, registry, context.run.row_limit)
            )
        self._datasets = datasets
        self._source, self._generates = context.source, context.run.config.source.facts.num_prompts is not None
        data = context.run.config.data
        every = (
            (source.config, row, example)
            for source in self._datasets
            for row, example in read_examples(source, self._tokenizer, data, self._check)
        )
        taken = list(islice(every, config.max_samples))
        self._examples = [(row, example) for _, row, example in taken]
        self._keys = [question_key(row, dataset) for dataset, row, _ in taken]
        if not self._examples:
            labels = ", ".join(source.dataset.label for source in self._datasets)
            raise DataError(f"{labels}: no row can be used as a held-out prompt. Give at least one.")
        # Rewards must be closed. They are made last, so that no later error can leave them open.
        self._rewards = make_rewards(config.rewards, context.run.host.registry)

    def _check(self, row: Mapping[str, Any], example: GenerationExample) -> None:
        check_reference(self._config.rewards, example.reference_text, row)

    def summary(self) -> Mapping[str, Any]:
        sizes = [len(source.dataset) for source in self._datasets]
        # The keys of a source that does not generate are hashes of whole samples, not of prompts.
        trained = self._source.sample_keys() if self._generates else None
        places = [example.location for _, example in self._examples]
        keys = np.array(self._keys, np.uint64)
        return {
            "prompts": len(self._examples),
            "sources": dict(zip(store_labels(self._datasets), sizes, strict=True)),
            "read_in_part": False,
            "notes": [] if trained is None else note_of_shared(keys, trained, places.__getitem__),
        }

    def longest(self) -> Longest:
        """Return the longest prompt together with the longest possible answer."""
        lengths = [len(example.prompt_ids) for _, example in self._examples]
        longest = max(lengths)
        where = f"prompt {lengths.index(longest)} of the held-out data"
        tokens = longest + self._config.max_new_tokens
        return Longest(tokens, where, f"{self._where}.max_new_tokens", prompt_tokens=longest)

    def fingerprint(self) -> str:
        return fingerprint_of([source.dataset.fingerprint() for source in self._datasets])

    def metrics(self) -> Collection[str]:
        return self._rewards.keys()

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the mean of each reward, and every answer with its scores. Raises RunFailedError if a reward fails."""
        assert isinstance(backend, Generates), f"{type(backend).__name__} does not generate, contrary to its config"
        answers: list[Answer] = []
        scores: list[dict[str, float]] = []
        for start in range(0, len(self._examples), self._config.batch_size):
            chunk = self._examples[start : start + self._config.batch_size]
            prompts = [example.prompt_ids for _, example in chunk]
            responses = backend.generate(prompts, max_new_tokens=self._config.max_new_tokens)
            answered = [
                Answer(
                    example.prompt_text,
                    str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)),
                    example.reference_text,
                    row,
                )
                for (row, example), tokens in zip(chunk, responses, strict=True)
            ]
            answers += answered
            scores += self._scored(answered)
        means = {name: sum(each[name] for each in scores) / len(scores) for name in self._rewards}
        samples = [
            {"prompt": answer.prompt, "response": answer.response, "reference": answer.reference, "scores": terms}
            for answer, terms in zip(answers, scores, strict=True)
        ]
        return means, samples

    def close(self) -> None:
        close_all(self._rewards)

    def _scored(self, answers: Sequence[Answer]) -> list[dict[str, float]]:
        terms = terms_of_all(self._rewards, answers, retries=self._config.retries)
        # Use another thread, since a notebook already runs an event loop on this one.
        with ThreadPoolExecutor(1, "spurline-scoring") as scoring:
            try:
                return scoring.submit(asyncio.run, terms).result()
            except AttemptFailedError as error:
                raise RunFailedError(str(error)) from error
