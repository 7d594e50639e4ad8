"""Held-out evaluation: mean loss per token with the loss's own metrics, and scores of generated answers.

Place on the way: eval datasets -> tokens -> batches (same collator and prefetch as training) -> backend -> `eval/...`
metrics; and prompts -> answers of the backend -> rewards, called as those of rollouts are. Draws no random numbers that
training could miss, so evaluating more or less often never changes what is trained.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from spurline.config.run_config import GenerationEvalConfig
from spurline.data.batch import TrainingBatch
from spurline.data.prompts import read_examples
from spurline.data.sft import SampleSet, longest_sample
from spurline.errors import RunFailedError
from spurline.protocols.backend import Backend, Generates
from spurline.protocols.environment import AttemptFailedError
from spurline.protocols.loss import Loss, Objective
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.reward import Answer, Reward
from spurline.protocols.source import HeldOutEvaluation, Longest, Samples, SourceContext
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.rl.scoring import reward_terms
from spurline.update.update import with_reference_logprobs


class Evaluation(HeldOutEvaluation):
    """Evaluates a backend on the config's `data.eval`. samples: how that data is read, when not one sample per row."""

    other_data = (
        "The held-out data is not what the checkpoint was evaluated on, so its scores could not be compared. "
        "Restore it, or start anew with another run_dir."
    )

    def __init__(self, context: SourceContext, loss: Loss, samples: Samples | None = None) -> None:
        run = context.config
        self._loss = loss
        self._config = run
        self._registry = context.host.registry
        self._samples = SampleSet(run.data.eval, context) if samples is None else samples
        generate = run.evaluation.generate
        answered = self._samples.answered()
        self._answers = GeneratedAnswers(generate, answered, context) if generate is not None else None

    def summary(self) -> Mapping[str, Any]:
        return self._samples.summary()

    def longest(self) -> Longest:
        samples = longest_sample(self._samples)
        answers = None if self._answers is None else self._answers.longest()
        return samples if answers is None or samples.tokens >= answers.tokens else answers

    def fingerprint(self) -> str:
        return self._samples.fingerprint()

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics and sample answers.

        `eval/loss` in nats per token, `eval/NAME` per metric of the loss and per reward, `eval/time` in seconds.
        """
        begin = time.perf_counter()
        metrics = self._means(backend)
        samples: list[dict[str, Any]] = []
        if self._answers is not None:
            scores, samples = self._answers.score(backend)
            metrics |= scores
        return {**metrics, "eval/time": time.perf_counter() - begin}, samples

    def _means(self, backend: Backend) -> dict[str, float]:
        """Means of the loss and of its own metrics, by loss weight."""
        size = self._config.evaluation.batch_size or self._config.batch_size
        count = sum(self._samples.sizes())
        num_batches = math.ceil(count / size)

        def build(number: int) -> TrainingBatch:
            numbers = np.arange((number - 1) * size, min(number * size, count), dtype=np.int64)
            return self._samples.batch(numbers, training=False)

        prefetch: Prefetch = self._registry.create(
            "prefetch", self._config.prefetch, build=build, last_step=num_batches
        )
        totals: dict[str, float] = {}
        weight = 0.0
        try:
            prefetch.start(1)
            for number in range(1, num_batches + 1):
                batch = prefetch.next(number)
                complete = with_reference_logprobs(batch, self._loss, backend)
                sums = backend.evaluate(complete, Objective(self._loss, normalizer=1.0))
                for name, total in {"loss": sums.loss, **sums.metrics}.items():
                    totals[f"eval/{name}"] = totals.get(f"eval/{name}", 0.0) + total
                weight += sums.weight
                batch.release()
        finally:
            prefetch.close()
        return {name: total / weight for name, total in totals.items()}


class GeneratedAnswers:
    """Greedy answers to held-out prompts, scored by reward components."""

    def __init__(
        self, config: GenerationEvalConfig, datasets: Sequence[DatasetToTokenize], context: SourceContext
    ) -> None:
        self._config = config
        self._tokenizer = context.tokenizer
        self._rewards: dict[str, Reward] = {
            name: context.host.registry.create("reward", reward) for name, reward in config.rewards.items()
        }
        every = (item for source in datasets for item in read_examples(source, self._tokenizer, context.config.data))
        self._examples = list(islice(every, config.max_samples))

    def longest(self) -> Longest | None:
        """The longest prompt with a whole answer behind it."""
        lengths = [len(example.prompt_ids) for _, example in self._examples]
        if not lengths:
            return None
        longest = max(lengths)
        where = f"prompt {lengths.index(longest)} of the held-out data"
        tokens = longest + self._config.max_new_tokens
        return Longest(tokens, where, "evaluation.generate.max_new_tokens", prompt_tokens=longest)

    def score(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Mean of each reward as `eval/NAME`, and every answer with its scores. Raises RunFailedError."""
        assert isinstance(backend, Generates), f"{type(backend).__name__} does not generate, whatever its config says"
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
        means = {f"eval/{name}": sum(each[name] for each in scores) / len(scores) for name in self._rewards}
        samples = [
            {"prompt": answer.prompt, "response": answer.response, "reference": answer.reference, "scores": terms}
            for answer, terms in zip(answers, scores, strict=True)
        ]
        return means, samples

    def _scored(self, answers: Sequence[Answer]) -> list[dict[str, float]]:
        async def score() -> list[dict[str, float]]:
            return [await reward_terms(self._rewards, answer) for answer in answers]

        # On a thread of its own: whoever trains in a notebook has an event loop on this one.
        with ThreadPoolExecutor(1, "spurline-scoring") as scoring:
            try:
                return scoring.submit(asyncio.run, score()).result()
            except AttemptFailedError as error:
                raise RunFailedError(str(error)) from error
