"""Check the models that a run uses and does not train (`model.frozen`), before any weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spurline.config.run_config import FrozenModelConfig, ModelConfig, RunConfig
from spurline.errors import ModelError
from spurline.protocols.backend import Role
from spurline_models.architecture import build_without_memory, has_score, load_model_config, model_of
from spurline_models.loading import check_config, check_weights_fit, quiet_loading
from spurline_models.streams.stream_model import StreamModel
from spurline_text.tokenizer import load_tokenizer

_SETTINGS = re.compile(rf"\bmodel\.(?=({'|'.join(FrozenModelConfig.model_fields)})\b)")


@contextmanager
def naming_frozen(model: ModelConfig, role: Role) -> Iterator[None]:
    """Let errors in the context name the settings of this role's model, such as `model.frozen.teacher.path`."""
    try:
        yield
    except ModelError as error:
        if role not in model.frozen:
            raise
        raise ModelError(_SETTINGS.sub(f"model.frozen.{role}.", str(error))) from error


def check_frozen(run: RunConfig) -> None:
    """Raise ModelError if a model of `model.frozen` cannot be loaded, or has other tokens than the trained model.

    This reads configs, tokenizers and the headers of files, but no weights.
    """
    for role in run.model.frozen:
        with naming_frozen(run.model, role):
            model = model_of(run.model, role)
            config = load_model_config(model)
            # The reference is the trained model as it was at first, and new score heads begin with zeros.
            if model.head == "score" and role != "reference" and not has_score(config):
                raise ModelError(
                    f"model.path: {model.path} has no score head, and would give every text the score 0. Choose a "
                    "trained reward model, such as RUN_DIR/model of its run."
                )
            causal = build_without_memory(config, model)
            check_config(causal, model.path, run.data.max_length)
            with quiet_loading():
                StreamModel(causal)
            check_weights_fit(model)
            _check_tokens(run.model, model)
            if role in run.loss.roles and model.head != run.loss.head:
                raise ModelError(
                    f"model.head: is {model.head}, and loss '{run.loss.name}' reads this model with head: "
                    f"{run.loss.head}. Change it, or choose another model."
                )


def _check_tokens(trained: ModelConfig, frozen: ModelConfig) -> None:
    """Raise ModelError if the frozen model's tokenizer has other tokens. A folder may lack a tokenizer."""
    folder = Path(frozen.path)
    if frozen.path in (trained.path, trained.tokenizer) or (folder.is_dir() and not list(folder.glob("*token*"))):
        return
    ours, theirs = (load_tokenizer(model).get_vocab() for model in (trained, frozen))
    differing = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, len(ours)), token),
    )
    if not differing:
        return
    first = differing[0]
    ids = [f"is {vocabulary[first]}" if first in vocabulary else "is missing" for vocabulary in (ours, theirs)]
    raise ModelError(
        f"model.path: the tokenizer of {frozen.path} has other tokens than that of "
        f"{trained.tokenizer or trained.path}: {len(theirs):,} tokens and {len(ours):,}, of which {len(differing):,} "
        f"differ. The first is {first!r}, which {ids[0]} for the trained model and {ids[1]} for this one. Choose a "
        "model that was made with the same tokenizer."
    )
