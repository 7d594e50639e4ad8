"""Ask every engine a fixed request after a publish, and judge the answers with the trainer's own logprobs.

Data flow: publish -> probes to all engines -> answers -> the trainer's logprobs of them -> Judge -> accept or reject.

There are two probes. One is asked after the publish, and is generated as all requests are. Its prompt spans several
blocks of a prefix cache. The other one crosses the update: it begins before the update and ends after it, so its last
tokens show whether keys and values were computed again.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError, RunFailedError
from spurline.terminal import tell
from spurline_async_rl.proof.judgement import Judge, Verdict
from spurline_async_rl.source.configs import ProofConfig
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling, TakesWeights
from spurline_rl.trajectory import Turn

if TYPE_CHECKING:
    from spurline_async_rl.source.producer import Producer

PROMPT_TOKENS = 260
"""Tokens of the prompt. A prefix cache of vLLM shares whole blocks, of up to 128 tokens."""
ANSWER_TOKENS = 32
_CROSSING_TOKENS = 256
"""Most tokens of the answer that crosses an update."""
_CROSSED_TOKENS = 8
"""The answer that crosses an update ends when it has this many tokens of the new version."""
_SEED = 20_011
_SOON_S = 15.0
DIFFERENCE, DELIVERED, REJECTED = "publish/probe_diff", "publish/delivered", "publish/rejected"
UNCROSSED = "publish/uncrossed"
"""Metrics: the largest mean difference of logprobs, the smallest `delivered`, the number of rejected engines, and the
number of engines whose second answer did not cross the update."""
_ADVICE = (
    "Choose another source.weight_sync or another version of the engine, and report this fault to its authors. Or "
    "accept it with source.proof.on_undelivered: warn."
)

Score = Callable[[Sequence[Turn]], Sequence[NDArray[np.float32]]]
"""Returns the trainer's logprobs of the response tokens of each turn."""
_Answers = tuple[Mapping[str, GenerationResult], Mapping[str, GenerationResult]]
"""The answers to the probe and those to the request that crossed the update, by the engine's name."""


@dataclass(frozen=True)
class ProofSettings:
    """The settings of the proofs of one run.

    Attributes:
        config: The settings of the user. Its `every` is not 0.
        temperature: The temperature of the run's sampling.
        context: Largest number of tokens of prompt and response, if it is known.
        vocabulary: Number of tokens that the model knows, if the tokenizer may have more.
        in_fp32: Whether the trainer computes in fp32.
        crosses: Whether a probe crosses updates. It needs engines that compute keys and values again after an update.
        restarts: Whether a rejected engine may be replaced. Otherwise the run ends.
        timeout_s: Seconds that the engines may take to answer.
        report_s: Seconds after which a message says that the answers take long.
    """

    config: ProofConfig
    temperature: float
    context: int | None
    vocabulary: int | None
    in_fp32: bool
    crosses: bool
    restarts: bool
    timeout_s: float
    report_s: float


def make_probes(
    tokenizer: PreTrainedTokenizerBase, settings: ProofSettings
) -> tuple[GenerationRequest, GenerationRequest]:
    """Return the request that proves a publish, and the one that crosses it. The prompt has random ordinary tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = min(len(tokenizer), settings.vocabulary or len(tokenizer))
    ordinary = np.array([token for token in range(known) if token not in special], np.int64)
    room = PROMPT_TOKENS + _CROSSING_TOKENS if settings.context is None else settings.context
    # In a short context, prompt and answer get a third each. The answer that crosses the update may take the rest too.
    answer = max(1, min(ANSWER_TOKENS, room // 3))
    prompt = np.random.default_rng(_SEED).choice(ordinary, max(1, min(PROMPT_TOKENS, room - 2 * answer)))
    asked = GenerationRequest(
        prompt.tolist(),
        Sampling(temperature=settings.temperature, max_new_tokens=answer),
        _SEED,
        "the proof of a publish sample 0 turn 0",
        is_urgent=True,
    )
    # An answer that ends early would end before the update.
    longer = replace(asked.sampling, max_new_tokens=min(_CROSSING_TOKENS, room - len(prompt)), ignore_eos=True)
    name = "the proof across a publish sample 0 turn 0"
    return asked, replace(asked, sampling=longer, seed=_SEED + 1, name=name)


def note_worst(noted: dict[str, float], found: Mapping[str, float]) -> None:
    """Note the worse value of each metric of `settle`, if several publishes are reported together."""
    for name, value in found.items():
        worse = min if name == DELIVERED else max
        noted[name] = worse(noted.get(name, value), value)


class _Asked(NamedTuple):
    """The probes of one publish. `is_all` says whether all engines got the publish."""

    version: int
    is_all: bool
    answers: concurrent.futures.Future[_Answers]


class PublishProof:
    """The proofs of one run. All methods are called on the training thread.

    Args:
        producer: It is told on the event loop which tokens of which engines may be trained on.
        notify: Called on the event loop when all engines have answered.
    """

    def __init__(
        self,
        engine: TakesWeights,
        settings: ProofSettings,
        tokenizer: PreTrainedTokenizerBase,
        loop: LoopThread,
        producer: Producer,
        notify: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._loop = loop
        self._producer = producer
        self._notify = notify
        self._judge = Judge(in_fp32=settings.in_fp32)
        self._num_publishes = 0
        self._is_due = False
        self._asked: list[_Asked] = []
        self._failure: Exception | None = None
        # Engines about which `on_undelivered: warn` has told.
        self._told: set[str] = set()
        engine.needs_proof = settings.config.on_undelivered != "warn"
        # The newest version that each engine has proven.
        self._proven: dict[str, int] = {}
        self._probe, crossing = make_probes(tokenizer, settings)
        self._crossing = crossing if settings.crosses else None
        self._second = replace(self._probe, seed=_SEED + 2, name="the second proof of a publish sample 0 turn 0")

    @property
    def unproven(self) -> int | None:
        """Return the oldest version that `settle` has not judged yet, or None if there is none."""
        return min((asked.version for asked in self._asked), default=None)

    @property
    def is_answered(self) -> bool:
        """Return whether all engines have answered, so that `settle` does not wait."""
        return all(asked.answers.done() for asked in self._asked)

    def before_publish(self, members: Sequence[TakesWeights] | None) -> None:
        """Decide whether the next publish is proven. `members` are the engines that get it, or None for all.

        A publish to engines that were started again is always proven.
        """
        has_new = members is not None or len(self._engine.awaiting_weights) > 0
        self._is_due = has_new or self._num_publishes % self._settings.config.every == 0
        self._num_publishes += members is None
        if members is None:
            self._engine.crossing = self._crossing if self._is_due else None

    def ask(self, version: int, members: Sequence[TakesWeights] | None) -> None:
        """Send the probes to the engines that got this version."""
        if self._is_due:
            names = None if members is None else [name for member in members for name in member.receivers]
            crosses = names is None and self._engine.crossing is not None
            answers = self._loop.start(self._answer(version, names, crosses=crosses))
            answers.add_done_callback(lambda _: self._notify())
            self._asked.append(_Asked(version, members is None, answers))

    async def _answer(self, version: int, names: Collection[str] | None, *, crosses: bool) -> _Answers:
        try:
            answers = await self._engine.generate_on_each(self._probe, names)
        except DataError as error:
            raise RunFailedError(
                f"The engine refuses the probe of source.proof: {error} Set source.proof.every: 0 to go on without it."
            ) from error
        return answers, await self._engine.take_crossed(version, _CROSSED_TOKENS) if crosses else {}

    def await_answers(self, *, for_checkpoint: bool = False) -> None:
        """Wait until all engines have answered. After an error, all later calls of this and of `settle` raise it too.

        Raises:
            RunFailedError: At the time limit.
        """
        # A run that was asked to stop has little time for its last checkpoint, so it soon says what it waits for.
        every_s = min(_SOON_S, self._settings.report_s) if for_checkpoint else self._settings.report_s
        before = ", before which no checkpoint is written," if for_checkpoint else ""
        with self._failing_for_good():
            for asked in self._asked:
                what = f"The proof that the engines have the weights of version {asked.version}{before}"
                self._loop.wait(asked.answers, self._settings.timeout_s, what, every_s=every_s)

    def settle(self, score: Score, *, for_checkpoint: bool = False) -> Mapping[str, float]:
        """Judge the answers to the last probes, and return metrics.

        The trainer must still have the published weights. Before this call, no token of these weights may be trained
        on. After an error, all later calls raise it too, so that no checkpoint holds what is not proven.

        Raises:
            RunFailedError: If an engine does not have the published weights, and is not replaced.
        """
        self.await_answers(for_checkpoint=for_checkpoint)
        metrics: dict[str, float] = {}
        # An error of the trainer, such as a lack of memory, leaves the weights unproven too.
        with self._failing_for_good():
            for asked in self._asked:
                note_worst(metrics, self._judge_all(asked, *asked.answers.result(), score))
        self._asked = []
        return metrics

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Raise the first error of a proof again in all later proofs."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def state_dict(self) -> dict[str, float]:
        """Return the measured difference of logprobs, from which the limit follows."""
        return {"tokens": self._judge.measured_tokens, "nats": self._judge.measured_nats}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._judge.measured_tokens, self._judge.measured_nats = int(state["tokens"]), state["nats"]

    def _judge_all(
        self,
        asked: _Asked,
        answers: Mapping[str, GenerationResult],
        crossed: Mapping[str, GenerationResult],
        score: Score,
    ) -> dict[str, float]:
        version = asked.version
        # An engine that has died gives no tokens.
        silent = {name for name, answer in answers.items() if not len(answer.token_ids)}
        answers = {name: answer for name, answer in answers.items() if name not in silent}
        if asked.is_all:
            silent |= self._proven.keys() - answers.keys()
        for name in silent:
            # Nobody knows with which weights this engine generated last.
            proven = self._proven.pop(name, -1)
            if self._engine.needs_proof:
                self._loop.call(self._producer.distrust, name, proven)
        scored = self._score([*answers.values(), *crossed.values()], score)
        verdicts = self._verdicts(version, answers, scored)
        doubted = [name for name, verdict in verdicts.items() if verdict.fault]
        if self._settings.restarts and doubted:
            # No engine is given up for a single answer. Colocated engines cannot answer now, since they sleep.
            asking = self._engine.generate_on_each(self._second, doubted)
            again = self._loop.run(asking, self._settings.timeout_s, "A second probe")
            again = {name: answer for name, answer in again.items() if len(answer.token_ids)}
            second = self._verdicts(version, again, self._score([*again.values()], score), learns=False)
            # The second answer has other tokens. If these show nothing of the update, the first answer decides.
            verdicts |= {
                name: verdict
                for name, verdict in second.items()
                if verdict.fault or verdict.delivered is not None or not verdicts[name].difference <= self._judge.bar
            }
        faults = {name: verdict.fault for name, verdict in verdicts.items()}
        for name, verdict in verdicts.items():
            if verdict.is_far:
                tell(
                    f"The logprobs of {name} differ from the trainer's by {verdict.difference:.2g} nats per token. "
                    "Check that both have the same precision, quantization and experts. Three times as much is allowed."
                )
        for name, answer in answers.items():
            if claimed := sorted({*answer.versions.tolist()} - {version}):
                faults[name] = f"it claims to have the weights of version {claimed[0]}"
        differences = [verdict.difference for verdict in verdicts.values()]
        num_uncrossed = 0
        for name, answer in crossed.items():
            # Old keys and values show most in the first tokens after the update.
            trainer, is_new = next(scored), np.flatnonzero(answer.versions == version)
            # An engine that died has no tokens.
            num_uncrossed += len(trainer) > 0 and not 0 < len(is_new) < len(trainer)
            if len(is_new):
                # Old keys and values change all logprobs. One alone may differ if its token went to another expert.
                difference = float(np.median(np.abs(answer.logprobs[is_new] - trainer[is_new])))
                differences.append(difference)
                if not difference <= self._judge.bar and not faults.get(name):
                    faults[name] = (
                        f"a response that it began before the update goes on with logprobs that differ from the "
                        f"trainer's by {difference:.2g} nats per token, so it has keys and values of older weights"
                    )
        faults = {name: fault for name, fault in faults.items() if fault}
        self._loop.call(self._accept, [name for name in answers if name not in faults], version)
        for name, fault in faults.items():
            self._reject(name, version, fault)
        delivered = [verdict.delivered for verdict in verdicts.values() if verdict.delivered is not None]
        return {
            **({DIFFERENCE: max(differences)} if differences else {}),
            **({DELIVERED: min(delivered)} if delivered else {}),
            **({UNCROSSED: float(num_uncrossed)} if crossed else {}),
            REJECTED: float(len(faults)),
        }

    def _verdicts(
        self,
        version: int,
        answers: Mapping[str, GenerationResult],
        scored: Iterator[NDArray[np.float32]],
        *,
        learns: bool = True,
    ) -> dict[str, Verdict]:
        return {
            name: self._judge.judge(version, answer.token_ids.tolist(), answer.logprobs, next(scored), learns=learns)
            for name, answer in answers.items()
        }

    def _score(self, answers: Sequence[GenerationResult], score: Score) -> Iterator[NDArray[np.float32]]:
        """Yield the trainer's logprobs of each answer. Equal answers are computed once."""
        turns: dict[tuple[int, ...], Turn] = {}
        for answer in answers:
            turn = Turn(
                prompt_ids=np.array(self._probe.prompt_ids, np.int32),
                response_ids=answer.token_ids,
                loss_mask=np.ones(len(answer.token_ids), np.uint8),
                logprobs=answer.logprobs,
                versions=answer.versions,
                routed_experts=answer.routed_experts,
            )
            turns.setdefault(tuple(answer.token_ids.tolist()), turn)
        found = dict(zip(turns, score([*turns.values()]), strict=True)) if turns else {}
        return (found[tuple(answer.token_ids.tolist())] for answer in answers)

    def _accept(self, names: Sequence[str], version: int) -> None:
        for name in names:
            self._proven[name] = version
            self._engine.accept(name, version)
            self._producer.trust(name, version)

    def _reject(self, name: str, version: int, fault: str) -> None:
        what = f"{name} does not generate with the weights of version {version}, which it has confirmed: {fault}."
        if self._settings.config.on_undelivered == "warn":
            if name not in self._told:
                self._told.add(name)
                tell(f"{what} Its tokens are trained on nevertheless (source.proof.on_undelivered: warn).")
            return
        if self._settings.config.on_undelivered == "stop" or not self._settings.restarts:
            raise RunFailedError(f"{what} {_ADVICE}")
        proven = self._proven.pop(name, -1)

        def replace_engine() -> None:
            self._producer.distrust(name, proven)
            self._engine.reject(name, fault)

        try:
            self._loop.call(replace_engine)
        except RunFailedError as error:
            raise RunFailedError(f"{what} {error} {_ADVICE}") from error
        tell(f"{what} It is started again. What it has made since its last proof is generated again.")
