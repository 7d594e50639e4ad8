"""Load the causal language model that a run trains, and refuse one that cannot be trained exactly.

Weights come in the profile's dtype on its device, each straight from its file: there are never two copies of the
model. What a model's config alone shows is refused here, also where the probe (`probe.py`) is switched off: losses that
would be left out, frequencies that would change between samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.loading_report import LoadStateDictInfo

from spurline.config.run_config import ModelConfig
from spurline.errors import DataError, ModelError, listing
from spurline_models.architecture import LOADING_ERRORS, build_without_memory, load_model_config
from spurline_models.device_profile import DeviceProfile
from spurline_models.streams.positions import rope_settings, rope_type
from spurline_models.weight_files import DTYPE_NAMES, DTYPES, safetensors_files
from spurline_text.hub import finding
from spurline_text.tokenizer import describe_missing

_BROKEN_FILES = (SafetensorError, EOFError)
_logger = logging.getLogger(__name__)

_NAMES_SHOWN = 3


HeldDtypes = Callable[[PreTrainedModel], Mapping[str, torch.dtype]]
"""Gives the dtypes of a model's parameters, by name, that are held in others than the profile's."""


def load_model(
    model: ModelConfig,
    profile: DeviceProfile,
    seed: int,
    change: Callable[[PreTrainedModel], None] | None = None,
    *,
    held_dtypes: HeldDtypes | None = None,
    on_host: bool = False,
    weights: dict[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Load the model, on the device, in training mode; with `init: random` its weights depend on `seed` alone.

    Args:
        model: The model to load.
        profile: The device and dtype of its weights.
        seed: Seed of random weights.
        change: Changes the model when weights have their dtypes. They are on the device then, except random ones, and
            with `on_host` all, which are still on the host.
        held_dtypes: Gives dtypes that weights are rounded to, through fp32, while they are read.
        on_host: Whether weights are read to the host first.
        weights: Weights on the host, by their names in files, instead of those of the files. Each is taken out when it
            is read, so that there are never two copies of the model.
    """
    config = load_model_config(model)
    try:
        with quiet_loading(), finding("model.path", model.path):
            if weights is None and model.init == "random":
                torch.manual_seed(seed)
                causal = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, trust_remote_code=model.trust_remote_code
                )
            else:
                device = torch.device("cpu") if on_host else profile.device
                causal = _with_weights(model, config, device, held_dtypes, weights)
    except (*LOADING_ERRORS, *_BROKEN_FILES) as error:
        # An architecture that cannot be built at all is another mistake than weights that cannot be read.
        build_without_memory(config, model)
        raise ModelError(_loading_failed(model, error)) from error
    if profile.weight_dtype == torch.float64 and hasattr(causal, "set_experts_implementation"):
        # The grouped matrix product of experts has no float64 kernel.
        causal.set_experts_implementation("eager")
    _cast(causal, profile.weight_dtype, {} if held_dtypes is None else held_dtypes(causal))
    if change is not None:
        change(causal)
    nn.Module.to(causal, device=profile.device)
    return causal.train()


def _cast(causal: nn.Module, dtype: torch.dtype, held: Mapping[str, torch.dtype]) -> None:
    """Give floating point weights and buffers this dtype, or the one that `held` names, one at a time."""
    by_parameter = {id(causal.get_parameter(name)): own for name, own in held.items()}
    for parameter in causal.parameters():
        if parameter.is_floating_point():
            # The data, not the parameter: a tied weight has two owners.
            parameter.data = parameter.data.to(by_parameter.get(id(parameter), dtype))
    for module in causal.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _with_weights(
    model: ModelConfig,
    config: PretrainedConfig,
    device: torch.device,
    held_dtypes: HeldDtypes | None,
    weights: dict[str, Tensor] | None,
) -> PreTrainedModel:
    """Return the model with `weights`, or the pretrained ones. Raises ModelError if some are lacking."""
    # No pickle is opened, of the hub neither; the files are those that were checked, whatever a config names besides.
    files = safetensors_files(model) if weights is None else []
    if not files and weights is None:
        raise ModelError(
            f"model.path: {model.path} has no safetensors files on the hub. Weights in other files are pickles, which "
            "can run code when they are opened: choose a revision or a model with safetensors files."
        )
    # Always through fp32: fp64 runs then start from the very weights of fp32 runs.
    causal = build_without_memory(config, model, torch.float32)
    if held_dtypes is not None:
        # A parameter is read in the dtype that it has here.
        _cast(causal, torch.float32, held_dtypes(causal))
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        slices: dict[str, Any] = {key: file.get_slice(key) for file in opened for key in file.keys()}  # noqa: SIM118
        if weights is not None:
            slices = {name: _held(weights, name) for name in weights}
        found, loading = read_into(causal, slices, device)
    type(causal)._finalize_model_loading(causal, loading, found)
    check_loaded(model, found.missing_keys, found.mismatched_keys, found.unexpected_keys)
    if causal.can_generate():
        causal.generation_config = _generation_config(model, causal)
    return causal


def read_into(
    causal: PreTrainedModel, slices: Mapping[str, Any], device: torch.device | str
) -> tuple[LoadStateDictInfo, LoadStateDictConfig]:
    """Read weights into a model on device `meta`, each in the dtype of its parameter and straight to this device.

    Files may change afterwards: what would stay mapped from them is copied, except shards of parameters on the host.

    Args:
        causal: The model.
        slices: Slices of safetensors files, by their names there.
        device: The device that weights are read to.

    Returns:
        Names that have no values afterwards, and others that do not fit; and how weights were loaded.
    """
    loading = LoadStateDictConfig(
        # Weights of other shapes are asked for too, so that they can be named.
        ignore_mismatched_sizes=True,
        dtype=torch.float32,
        weight_mapping=cast(Any, get_model_conversion_mapping(causal)),
        device_map={"": device},
    )
    mapped: set[int] = set()
    recorded = {name: _recorded(part, mapped) for name, part in slices.items()}
    found, _ = convert_and_load_state_dict_in_model(causal, recorded, loading)
    for value in (*causal.parameters(), *causal.buffers()):
        # The host's part of a divided parameter has no setter.
        if not value.is_meta and not isinstance(value, DTensor) and value.untyped_storage().data_ptr() in mapped:
            value.data = value.data.clone()
    return found, loading


def joined_weights(causal: PreTrainedModel, weights: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Make parameters of weights that files hold in another form, such as experts one by one.

    Args:
        causal: A model on device `meta`, which is there again afterwards.
        weights: Tensors, or slices of files, by their names in files.
        dtype: The dtype of the parameters.

    Returns:
        The parameters that can be made of these weights, by their names in the model, on CPU.
    """
    mapping: Any = get_model_conversion_mapping(causal)
    loading = LoadStateDictConfig(dtype=dtype, weight_mapping=mapping, device_map={"": "cpu"})
    with quiet_loading():
        convert_and_load_state_dict_in_model(causal, dict(weights), loading)
    found = {name: value.detach() for name, value in causal.named_parameters() if not value.is_meta}
    nn.Module.to(causal, device="meta")
    return found


def check_weights_fit(model: ModelConfig) -> None:
    """Raise ModelError as loading does if the files of a folder lack weights, or have them in other shapes.

    It reads headers alone. Models on the hub are not checked.
    """
    if model.init == "random" or not Path(model.path).is_dir():
        return
    causal = build_without_memory(load_model_config(model), model, torch.float32)
    slices: dict[str, Any] = {}
    for path in safetensors_files(model):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                slices[key] = _unread(file.get_slice(key))
    try:
        with quiet_loading():
            found, loading = read_into(causal, slices, "meta")
            type(causal)._finalize_model_loading(causal, loading, found)
    except LOADING_ERRORS as error:
        raise ModelError(_loading_failed(model, error)) from error
    # Weights without a place are a warning when they are loaded.
    check_loaded(model, found.missing_keys, found.mismatched_keys, ())


@dataclass(frozen=True)
class _Slice:
    """Stands in the place of a slice of a file. dtype: its name in files. read: gives the values of a part."""

    shape: list[int]
    dtype: str
    read: Callable[[Any], Tensor]

    def __getitem__(self, place: Any) -> Tensor:
        return self.read(place)

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


def _unread(part: Any) -> _Slice:
    """Make a slice that has the shape of another one and no values."""
    shape, dtype = part.get_shape(), part.get_dtype()
    return _Slice(shape, dtype, torch.empty(shape, dtype=DTYPES.get(dtype), device="meta").__getitem__)


def _held(weights: dict[str, Tensor], name: str) -> _Slice:
    """Make a slice of a weight on the host, which reading takes out of `weights`."""
    weight = weights[name]
    return _Slice(list(weight.shape), DTYPE_NAMES[weight.dtype], lambda place: weights.pop(name)[place])


def _recorded(part: Any, mapped: set[int]) -> _Slice:
    """Make a slice that notes where in memory the values of another one are mapped."""

    def read(place: Any) -> Tensor:
        values = part[place]
        mapped.add(values.untyped_storage().data_ptr())
        return values

    return _Slice(part.get_shape(), part.get_dtype(), read)


def _generation_config(model: ModelConfig, causal: PreTrainedModel) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    except OSError:  # a model without a generation_config.json
        return causal.generation_config


def check_loaded(
    model: ModelConfig, missing_keys: Collection[str], mismatched: Collection[Any], unexpected_keys: Collection[str]
) -> None:
    """Raise ModelError unless the files held every weight in its shape; warn of weights without a place.

    `mismatched` has (name, shape in the files, shape in the model) of weights of another shape.
    """
    missing, unexpected = sorted(missing_keys), sorted(unexpected_keys)
    if mismatched:
        name, found, expected = sorted(mismatched, key=str)[0]
        raise ModelError(
            f"model.path: {len(mismatched)} weights of {model.path} have other shapes than its config asks for: {name} "
            f"is {tuple(found)} in the files and {tuple(expected)} in the model. {_what_may_not_fit(model)}"
        )
    if missing:
        raise ModelError(
            f"model.path: the files of {model.path} lack {len(missing)} weights that its config asks for, which would "
            f"stay random: {_some(missing)}. {_what_may_not_fit(model)}"
        )
    # Overrides of the architecture, such as the number of layers, leave some out on purpose.
    if unexpected and not model.config_overrides:
        _logger.warning(
            "model.path: %s weights of %s have no place in the model and are left out: %s.",
            len(unexpected),
            model.path,
            _some(unexpected),
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


def _what_may_not_fit(model: ModelConfig) -> str:
    if model.config_overrides:
        return f"model.config_overrides changes {listing(model.config_overrides)}, which these weights do not fit."
    return "Are config.json and the weights of the same model?"


def _loading_failed(model: ModelConfig, error: Exception) -> str:
    message = describe_missing("model.path", model.path, "weights", error, model.trust_remote_code)
    if model.init == "pretrained":
        message += "\nTo train this architecture from scratch set model.init: random."
    if model.config_overrides:
        message += f"\nmodel.config_overrides changes {listing(model.config_overrides)}; does it fit the weights?"
    return message


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the progress bars and tables of transformers, which would write into the terminal tracker's output."""
    enabled, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if enabled:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True)
class LengthLimit:
    """The tokens per sample up to which rotary frequencies of this type are those of each sample alone."""

    tokens: int
    rope_type: str

    def check(self, longest: int) -> None:
        """Raise DataError for a batch whose longest sample would change the frequencies of the others."""
        if longest > self.tokens:
            raise DataError(
                f"A sample has {longest} tokens, but rotary frequencies of type '{self.rope_type}' switch beyond "
                f"{self.tokens} for all samples of a micro-batch. Shorten it to {self.tokens} tokens."
            )


def check_config(causal: PreTrainedModel, path: str, max_length: int) -> LengthLimit | None:
    """Check that a model can be trained exactly.

    Args:
        causal: The model.
        path: Its path, for errors.
        max_length: Tokens of the longest sample that the run's data may have.

    Returns:
        The limit that batches must keep, if there is one.

    Raises:
        ModelError: If it cannot.
    """
    return check_settings(causal.config, f"{path} ({type(causal).__name__})", max_length)


def check_settings(config: PretrainedConfig, name: str, max_length: int) -> LengthLimit | None:
    """Check as `check_config` does, for a model that is not loaded. name: the model's, for errors."""
    name = f"model.path: {name}"
    for part in (config, config.get_text_config()):
        if getattr(part, "output_router_logits", False):
            raise ModelError(
                f"{name} sets output_router_logits, by which transformers adds an auxiliary loss for routers over the "
                "tokens of a batch: its gradient depends on how that is cut. Set model.config_overrides: "
                "{output_router_logits: false}; model.router_aux_loss: config balances routers sequence by sequence."
            )
    limit = length_limit(config)
    if limit is not None and max_length > limit.tokens:
        raise ModelError(
            f"{name} has rotary frequencies of type '{limit.rope_type}', which switch for all samples of a micro-batch "
            f"when the longest has more than {limit.tokens} tokens, and data.max_length allows {max_length}. "
            f"Set data.max_length: {limit.tokens} or less."
        )
    return limit


def length_limit(config: PretrainedConfig) -> LengthLimit | None:
    """Return the limit that batches of a model with this config must keep, if there is one."""
    return min(_switching_rope(config.get_text_config()), key=lambda limit: limit.tokens, default=None)


def _switching_rope(config: PretrainedConfig) -> Iterator[LengthLimit]:
    """Yield limits of the rotary settings under which transformers chooses frequencies by the largest position."""
    for settings in rope_settings(config):
        name = rope_type(settings)
        longest = getattr(config, "max_position_embeddings", None)
        if name == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            longest = settings.get("original_max_position_embeddings") or own or longest
        elif "dynamic" not in name:
            continue
        # Without a known limit every length may switch.
        yield LengthLimit(int(longest or 0), name)
