"""Decoding with a cache: the model's own tokens, whatever comes, goes and lies beside a row."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import PROMPTS, excite, greedy_without_cache, local_backend, write_model_folder
from model_families import FAMILIES, Family, tiny_model

from spurline.config.run_config import ModelConfig
from spurline.errors import DataError, ModelError
from spurline_models.local.backend import LocalBackend
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.attention import generating
from spurline_rl.engines.in_process.decoder import Decoder, OwnCacheDecoder, probed_decoder
from spurline_rl.engines.in_process.response import Response
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_text.stop_texts import StopTexts
from spurline_text.testing.inputs import tiny_tokenizer

END = tiny_tokenizer().eos_token_id
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "odd-sizes": {"hidden_size": 36, "head_dim": 6, "intermediate_size": 51},
    "windows": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
    "mixed-windows": {
        "model_type": "gemma3_text",
        "architectures": None,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "experts": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def make_backend(folder: Path, **changes: Any) -> LocalBackend:
    return excite(local_backend(write_model_folder(folder, **changes)))


def make_decoder(backend: LocalBackend, kind: type[Decoder] = Decoder, **limits: int) -> Decoder:
    return kind(backend.generation_model(), tiny_tokenizer(), InProcessEngineConfig(**limits))


def probed(backend: LocalBackend, *, deterministic: bool = False) -> Decoder:
    return probed_decoder(lambda kind: make_decoder(backend, kind), deterministic=deterministic)


def row(prompt: Sequence[int], seed: int = 0, **sampling: Any) -> Response:
    fields: dict[str, Any] = {"max_new_tokens": 12, **sampling}
    request = GenerationRequest(prompt, Sampling(**fields), seed, f"row {list(prompt)[:3]}")
    stop = request.sampling.stop
    return Response(request, list(prompt), StopTexts(tiny_tokenizer(), stop) if stop else None)


def write(decoder: Decoder, arrivals: dict[int, list[Response]]) -> None:
    """Decode until all rows have ended; `arrivals` holds them by the step at which they come."""
    waiting: deque[Response] = deque()
    step = 0
    with generating(decoder.model.causal, decoder.attention):
        while waiting or decoder.responses or any(later >= step for later in arrivals):
            waiting.extend(arrivals.get(step, []))
            taken, _ = decoder.take(waiting)
            decoder.advance(taken, step)
            step += 1


def greedy(backend: LocalBackend, prompt: list[int], max_new_tokens: int) -> list[int]:
    causal: Any = backend._model.causal
    return greedy_without_cache(causal, prompt, max_new_tokens, (causal.config.eos_token_id, END))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [Decoder, OwnCacheDecoder])
def test_greedy_decoding_equals_a_loop_without_a_cache(tmp_path: Path, model: str, kind: type[Decoder]) -> None:
    backend = make_backend(tmp_path / "model", **MODELS[model])
    rows = [row(prompt, temperature=0.0) for prompt in PROMPTS]
    write(make_decoder(backend, kind), {0: rows[:3], 2: rows[3:4], 5: rows[4:]})
    for written in rows:
        assert written.tokens == greedy(backend, written.prompt, 12)


def test_logprobs_do_not_depend_on_who_else_is_decoded(tmp_path: Path) -> None:
    backend = make_backend(tmp_path / "model")
    expected = [row(prompt, seed) for seed, prompt in enumerate(PROMPTS * 6)]
    for alone in expected:
        write(make_decoder(backend), {0: [alone]})
    together = [row(prompt, seed) for seed, prompt in enumerate(PROMPTS * 6)]
    write(make_decoder(backend, max_batch=7), {0: together[:11], 3: together[11:13], 4: together[13:]})
    for got, wanted in zip(together, expected, strict=True):
        assert got.tokens == wanted.tokens
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_bfloat16_and_float64_models_decode_as_they_train(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    for precision in ("bf16", "fp64"):
        backend = excite(local_backend(folder, precision=precision))
        rows = [row(prompt, temperature=0.0) for prompt in PROMPTS]
        write(make_decoder(backend), {0: rows})
        again = [row(prompt, temperature=0.0) for prompt in PROMPTS]
        for alone in again:
            write(make_decoder(backend), {0: [alone]})
        tolerance = 0.1 if precision == "bf16" else 1e-12
        for got, wanted in zip(rows, again, strict=True):
            assert got.tokens[0] == wanted.tokens[0]
            assert got.logprobs[0] == pytest.approx(wanted.logprobs[0], abs=tolerance)


def test_the_batch_keeps_to_its_rows_and_tokens_and_to_the_order_of_requests(tmp_path: Path) -> None:
    backend = make_backend(tmp_path / "model")
    decoder = make_decoder(backend, max_batch=3, max_cache_tokens=40)
    short, long = [row([5, 6, 7], max_new_tokens=8) for _ in range(5)], row([5] * 30, max_new_tokens=30)
    waiting = deque([*short[:4], long, short[4]])
    assert decoder.take(waiting)[0] == short[:3]
    decoder.responses = short[:2]
    assert decoder.take(waiting)[0] == short[3:4]
    decoder.responses = short[3:4]
    assert decoder.take(waiting)[0] == [], "the long one waits, and nobody overtakes it"
    decoder.responses = []
    assert decoder.take(waiting)[0] == [long], "alone it may exceed the limit"
    decoder.responses = [long]
    assert decoder.take(waiting)[0] == []


def test_a_prompt_that_several_rows_share_is_read_once(tmp_path: Path) -> None:
    backend = make_backend(tmp_path / "model")
    read: list[int] = []
    handle = backend._model.decoder.register_forward_pre_hook(
        lambda module, arguments, keywords: read.append(keywords["input_ids"].numel()), with_kwargs=True
    )
    rows = [row(prompt, seed, max_new_tokens=1) for seed in range(8) for prompt in PROMPTS]
    write(make_decoder(backend), {0: rows})
    handle.remove()
    assert read == [sum(map(len, PROMPTS))]
    assert all(len(written.tokens) == 1 for written in rows)


def test_the_cache_is_freed_when_nothing_is_left_to_write(tmp_path: Path) -> None:
    decoder = make_decoder(make_backend(tmp_path / "model"))
    write(decoder, {0: [row(prompt) for prompt in PROMPTS]})
    assert not decoder._cache._layers


@pytest.mark.parametrize("token", [-1, 61])
def test_a_token_that_the_model_does_not_know_is_an_error_not_a_crash(tmp_path: Path, token: int) -> None:
    bad = row([5, token])
    write(make_decoder(make_backend(tmp_path / "model")), {0: [bad, row([5])]})
    with pytest.raises(DataError, match=rf"row.*token {token}.*0 to 60"):
        bad.result()


def test_a_model_that_keeps_keywords_from_its_attention_is_refused(tmp_path: Path) -> None:
    backend = make_backend(tmp_path / "model")
    backend._model.decoder.register_forward_pre_hook(
        lambda module, arguments, keywords: (arguments, {**keywords, "kv_pass": None}), with_kwargs=True
    )
    with pytest.raises(ModelError, match=r"keyword arguments.*in_process"):
        write(make_decoder(backend), {0: [row([5])]})


def test_a_model_that_remembers_more_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    backend = make_backend(tmp_path / "model")

    def mix(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        # As a convolution over two tokens, which finds no token before it when tokens come one by one.
        return output + torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    backend._model.decoder.layers[0].mlp.register_forward_hook(mix)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"with and without a cache.*source\.engine\.name"):
        probed(backend)


REMEMBERING = [
    family for family in FAMILIES if family.model_type in ("qwen3_5_text", "gpt_oss", "gemma2", "llama4_text", "mamba")
]


@pytest.mark.parametrize("family", REMEMBERING, ids=lambda family: family.model_type)
def test_models_that_remember_otherwise_decode_each_response_alone(tmp_path: Path, family: Family) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    backend = local_backend(tmp_path / "model", run={"model": ModelConfig(path=str(tmp_path / "model"))})
    decoder = probed(backend, deterministic=True)
    assert isinstance(decoder, OwnCacheDecoder)
    rows = [row(prompt, temperature=0.0, max_new_tokens=8) for prompt in [*PROMPTS, *PROMPTS]]
    write(decoder, {0: rows[:3], 2: rows[3:4], 5: rows[4:]})
    for written in rows:
        assert written.tokens == greedy(backend, written.prompt, 8)
    alone = [row(written.prompt, temperature=0.0, max_new_tokens=8) for written in rows[:4]]
    for one, other in zip(alone, rows, strict=False):
        write(decoder, {0: [one]})
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
    assert not decoder._caches


def test_stop_texts_are_found_at_the_very_token_whatever_the_bytes() -> None:
    tokenizer = tiny_tokenizer()
    draw = random.Random(0)
    found = 0
    for _ in range(400):
        text = "".join(draw.choices("abE ND\n€é🙂日本", k=draw.randint(1, 40)))
        tokens = tokenizer.encode(text)
        for _ in range(draw.choice([0, 0, 3])):
            # Bytes that are no text, and special tokens.
            tokens.insert(draw.randrange(len(tokens) + 1), draw.choice([1, 2, 190, 200, 255]))
        stop = ["".join(draw.choices("abE ND\n€é🙂日", k=draw.choice([1, 1, 2, 3]))) for _ in range(2)]
        whole = [tokenizer.decode(tokens[:end], skip_special_tokens=False) for end in range(1, len(tokens) + 1)]
        expected = next((end for end, so_far in enumerate(whole) if any(part in so_far for part in stop)), None)
        watch = StopTexts(tokenizer, stop)
        got = next((end for end, token in enumerate(tokens) if watch.completed_by(token)), None)
        assert got == expected, (text, stop)
        found += expected is not None
    assert 100 < found < 390


def test_stop_texts_with_a_tokenizer_that_puts_spaces_between_words() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁the", "▁end", "▁", "en", "d", "▁e", "nd", "."]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="."))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    draw = random.Random(1)
    for _ in range(300):
        tokens = draw.choices(range(len(words)), k=12)
        stop = [draw.choice(["the end", " end", "end.", "d en", "nd", "  ", "e e"])]
        expected = next((end for end in range(12) if stop[0] in tokenizer.decode(tokens[: end + 1])), None)
        watch = StopTexts(tokenizer, stop)
        assert next((end for end, token in enumerate(tokens) if watch.completed_by(token)), None) == expected
