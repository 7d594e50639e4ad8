"""Read the rollouts that a run keeps, of a finished run or of one that is going on.

    rollouts = KeptRollouts(run_dir)
    for attempt in rollouts.attempts(steps=[40]):
        print(attempt.uid, attempt.reward, attempt.turns[-1].response_text)

Lazy: a step is unpacked when its attempts are asked for, arrays when they are looked at. Needs no tokenizer, no config
and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spurline.errors import RunDirectoryError
from spurline_rl.kept_rollouts.blocks import FORMAT, of_runs, unpacked
from spurline_rl.kept_rollouts.members import ROLLOUTS_FILE, members_of, unpack
from spurline_text.shown_pieces import shown, text_of


@dataclass(frozen=True)
class LostPrompt:
    """A prompt that was given up in a step: its attempts failed. reason: where and why."""

    step: int
    uid: str
    draw: int
    reason: str


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """One call of the model. Arrays are read-only; those of the response have one value per response token.

    finish_reason: as of Turn. reward: of its tokens; None in attempts of a single turn, whose reward it is.
    """

    finish_reason: str
    reward: float | None
    _block: _Block
    _number: int

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """int32 [P]: the whole context."""
        return self._block.contexts(self._number)[0]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """int32 [A]."""
        return self._block.contexts(self._number)[1]

    @property
    def prompt_text(self) -> str:
        return self._block.text(self.prompt_ids)

    @property
    def response_text(self) -> str:
        return self._block.text(self.response_ids)

    @property
    def response_pieces(self) -> list[str]:
        """A text for each response token; see `spurline_text.shown_pieces.shown`."""
        return list(shown(self._block.pieces[token_id] for token_id in self.response_ids.tolist()))

    @property
    def prompt_pieces(self) -> list[str]:
        return list(shown(self._block.pieces[token_id] for token_id in self.prompt_ids.tolist()))

    @property
    def logprobs(self) -> NDArray[np.float16] | None:
        """float16 [A]: of the engine when it sampled; None where it tells none."""
        return self._column("logprobs")

    @property
    def gap(self) -> NDArray[np.float16] | None:
        """float16 [A]: the trained model's logprob before the update, less the engine's; None for filtered attempts.

        Rounded as a difference, so that a small gap is as precise as a large one.
        """
        return self._column("gap")

    @property
    def old_logprobs(self) -> NDArray[np.float32] | None:
        """float32 [A]: of the trained model before the update."""
        gap, logprobs = self.gap, self.logprobs
        if gap is None or logprobs is None:
            old = self._column("old_logprobs")
            return None if old is None else old.astype(np.float32)
        return logprobs.astype(np.float32) + gap

    @property
    def advantages(self) -> NDArray[np.float32] | None:
        """float32 [A]; None for attempts that were not trained on."""
        one = self._block.advantage_of_turn(self._number)
        if one is not None:
            return np.full(len(self.response_ids), one, np.float32)
        found = self._column("advantages")
        return None if found is None else found.astype(np.float32)

    @property
    def versions(self) -> NDArray[np.int32] | None:
        """int32 [A]: the weights that each token came from, counted in steps."""
        return self._column("versions")

    @property
    def ages(self) -> NDArray[np.int32] | None:
        """int32 [A]: updates between those weights and those that were trained; 0 in synchronous runs."""
        versions = self.versions
        return None if versions is None else self._block.step - 1 - versions

    @property
    def loss_mask(self) -> NDArray[np.uint8]:
        """uint8 [A]: 0 where a token was not trained on."""
        found = self._column("loss_mask")
        return np.ones(len(self.response_ids), np.uint8) if found is None else found

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are marks of the template or the model, and no text."""
        return self._block.special

    def _column(self, name: str) -> NDArray[Any] | None:
        return self._block.column(name, self._number)


@dataclass(frozen=True, eq=False)
class KeptAttempt:
    """One attempt at a prompt, as a step trained on it or filtered it.

    uid, draw, epoch: of the prompt. columns: numbers of its row, by `source.carry`. tags: short values of its row.
    sample: which attempt of the group it is. reward: the weighted sum, with rewards of turns. rewards: terms by name,
    before weights. advantage: where all tokens have the same, else None. retries: attempts that failed before it. info:
    what the environment tells. one_in: of so many prompts of the step one was kept.
    """

    step: int
    status: Literal["trained", "filtered"]
    uid: str
    draw: int
    epoch: int
    columns: Mapping[str, float]
    tags: Mapping[str, Any]
    sample: int
    reward: float
    rewards: Mapping[str, float]
    advantage: float | None
    retries: int
    info: Mapping[str, Any]
    one_in: int
    num_response_tokens: int
    finish_reason: str
    _block: _Block
    _turns: range

    @property
    def turns(self) -> tuple[KeptTurn, ...]:
        """In order."""
        return tuple(self._block.turn(number) for number in self._turns)


class KeptRollouts:
    """The kept rollouts of a run. What a run adds meanwhile is seen after `refresh`.

    A run that has kept nothing has no steps. Raises RunDirectoryError for a folder that does not exist; for a file that
    something else has changed, here or when that place is read.
    """

    def __init__(self, run_dir: Path | str) -> None:
        if not Path(run_dir).is_dir():
            raise RunDirectoryError(f"There is no folder {run_dir} to read rollouts from. Give a run's run_dir.")
        self.path = Path(run_dir) / ROLLOUTS_FILE
        self.refresh()

    def refresh(self) -> None:
        """Look again at what there is."""
        self._members = {member.step: member for member in members_of(self.path)}

    @property
    def steps(self) -> Sequence[int]:
        """Steps whose rollouts there are, ascending. Of older ones some are missing once the file got too long."""
        return list(self._members)

    def attempts(self, steps: Iterable[int] | None = None) -> Iterator[KeptAttempt]:
        """Attempts in the order of training, those filtered after those trained on. steps: None for all.

        A step that is not there has none.
        """
        for block in self._blocks(steps):
            if block["status"] != "given_up":
                yield from _Block(block).attempts()

    def attempts_and_given_up(self, step: int) -> tuple[list[KeptAttempt], list[LostPrompt]]:
        """Both of a step, which is unpacked once."""
        attempts: list[KeptAttempt] = []
        lost: list[LostPrompt] = []
        for block in self._blocks([step]):
            if block["status"] == "given_up":
                lost += _lost_prompts(block)
            else:
                attempts += _Block(block).attempts()
        return attempts, lost

    def given_up(self, steps: Iterable[int] | None = None) -> Iterator[LostPrompt]:
        """Prompts that were given up while the groups of these steps were made."""
        for block in self._blocks(steps):
            if block["status"] == "given_up":
                yield from _lost_prompts(block)

    def _blocks(self, steps: Iterable[int] | None) -> Iterator[Mapping[str, Any]]:
        for step in self.steps if steps is None else steps:
            for line in self._lines(step):
                block = json.loads(line)
                if block["format"] > FORMAT:
                    raise RunDirectoryError(
                        f"{self.path}: the rollouts of step {step} have format {block['format']}, and this version "
                        f"reads up to {FORMAT}. Upgrade spurline."
                    )
                yield block

    def _lines(self, step: int) -> Iterator[bytes]:
        while step in self._members:
            lines = unpack(self.path, self._members[step])
            if lines is not None:
                return lines
            # A run that goes on has thinned the file out: the step lies elsewhere, or is gone.
            self.refresh()
        return iter(())


class _Block:
    """A line of the file, taken apart as far as it was asked for."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        self._block = block
        self.step: int = block["step"]
        self.special = frozenset[int](block["special"])
        self._turns: Mapping[str, Any] = block["turns"]
        self._tokens: Mapping[str, Any] = block["tokens"]

    def attempts(self) -> Iterator[KeptAttempt]:
        block, of = self._block, self._block["attempts"]
        prompts = block["prompts"]
        advantages = of.get("advantage")
        first = 0
        for number, count in enumerate(of["turns"]):
            prompt, turns = prompts[of["prompt"][number]], range(first, first + count)
            first += count
            yield KeptAttempt(
                step=self.step,
                status=block["status"],
                uid=prompt["uid"],
                draw=prompt["draw"],
                epoch=prompt["epoch"],
                columns=prompt["columns"],
                tags=prompt["tags"],
                sample=of["sample"][number],
                reward=of["return"][number],
                rewards=of["rewards"][number],
                advantage=None if advantages is None else advantages[number],
                retries=of["retries"][number],
                info=of["info"][number],
                one_in=block["one_in"],
                num_response_tokens=sum(self._turns["response"][turn] for turn in turns),
                finish_reason=self._turns["finish"][turns[-1]],
                _block=self,
                _turns=turns,
            )

    def turn(self, number: int) -> KeptTurn:
        rewards = self._turns.get("reward")
        reward = None if rewards is None else rewards[number]
        return KeptTurn(self._turns["finish"][number], reward, self, number)

    def contexts(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Prompt and response of a turn."""
        # What a turn shares it has from the turn before it, or from the first of its prompt, which may share too.
        way = [number]
        while self._turns["shared"][way[-1]]:
            way.append(self._first_turns.get(way[-1], way[-1] - 1))
        tokens = self._own(way.pop())
        for turn in reversed(way):
            tokens = np.concatenate([tokens[: self._turns["shared"][turn]], self._own(turn)])
        tokens.flags.writeable = False
        prompt = self._turns["prompt"][number]
        return tokens[:prompt], tokens[prompt:]

    def _own(self, number: int) -> NDArray[np.int32]:
        """The tokens of a turn that stand nowhere before it."""
        return self._ids[self._starts[number] : self._starts[number + 1]]

    @cached_property
    def _first_turns(self) -> Mapping[int, int]:
        """First turn of each attempt -> first turn of the first attempt at the same prompt."""
        found: dict[int, int] = {}
        first_of_prompt: dict[int, int] = {}
        of, first = self._block["attempts"], 0
        for prompt, count in zip(of["prompt"], of["turns"], strict=True):
            found[first] = first_of_prompt.setdefault(prompt, first)
            first += count
        return found

    @cached_property
    def _ids(self) -> NDArray[np.int32]:
        return unpacked(self._tokens["ids"], "<i4")

    @cached_property
    def _starts(self) -> list[int]:
        """Of each turn the place of its first own token."""
        turns = zip(self._turns["shared"], self._turns["prompt"], self._turns["response"], strict=True)
        return list(accumulate((prompt - shared + response for shared, prompt, response in turns), initial=0))

    @cached_property
    def _response_ends(self) -> list[int]:
        return list(accumulate(self._turns["response"]))

    def column(self, name: str, number: int) -> NDArray[Any] | None:
        """The part of a token column that belongs to a turn."""
        if name not in self._tokens:
            return None
        end = self._response_ends[number]
        return self._columns(name)[end - self._turns["response"][number] : end]

    def _columns(self, name: str) -> NDArray[Any]:
        if name not in self._unpacked:
            stored = self._tokens[name]
            if isinstance(stored, str):
                self._unpacked[name] = unpacked(stored, "<f2")
            else:
                values = of_runs(stored, _RUN_DTYPES[name])
                values.flags.writeable = False
                self._unpacked[name] = values
        return self._unpacked[name]

    @cached_property
    def _unpacked(self) -> dict[str, NDArray[Any]]:
        return {}

    def advantage_of_turn(self, number: int) -> float | None:
        advantages = self._block["attempts"].get("advantage")
        return None if advantages is None else advantages[self._attempt_of_turn[number]]

    @cached_property
    def _attempt_of_turn(self) -> list[int]:
        return [number for number, count in enumerate(self._block["attempts"]["turns"]) for _ in range(count)]

    @cached_property
    def pieces(self) -> Mapping[int, bytes]:
        """Bytes of each token that occurs."""
        return {
            int(token_id): piece.encode(errors="surrogatepass") if isinstance(piece, str) else bytes(piece)
            for token_id, piece in self._block["pieces"].items()
        }

    def text(self, ids: NDArray[np.int32]) -> str:
        return text_of(map(self.pieces.__getitem__, ids.tolist()))


def _lost_prompts(block: Mapping[str, Any]) -> list[LostPrompt]:
    return [LostPrompt(block["step"], prompt["uid"], prompt["draw"], prompt["reason"]) for prompt in block["prompts"]]


_RUN_DTYPES = {"versions": np.int32, "loss_mask": np.uint8}
