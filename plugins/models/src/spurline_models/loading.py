"""Load the causal language model that a run trains. Refuse models whose loss would depend on micro-batches.

Each weight goes directly from its file to its device and dtype, so there are never two copies of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.loading_report import LoadStateDictInfo

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError, listing
from spurline_models.architecture import LOADING_ERRORS, SCORE, build_without_memory, load_model_config, new_model
from spurline_models.device_profile import DeviceProfile
from spurline_models.experts.grouped_experts import EXPERTS_NAME
from spurline_models.lengths import LengthLimit, length_limit
from spurline_models.placement.narrow_weights import narrowable_modules
from spurline_models.weight_files import layout_of, safetensors_files, slices_of
from spurline_text.hub import finding
from spurline_text.tokenizer import describe_missing

_logger = logging.getLogger(__name__)


def load_model(
    model: ModelConfig,
    profile: DeviceProfile,
    seed: int,
    change: Callable[[PreTrainedModel], None] | None = None,
    *,
    narrow: torch.dtype | None = None,
    on_host: bool = False,
    weights: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Load the model onto the device, in training mode.

    Args:
        model: The model.
        profile: The device and dtype of the weights.
        seed: The seed of random weights (`init: random`).
        change: A function that changes the model after loading. At that time, random weights are still on the host.
        narrow: If given, matrices are converted to fp32 and then rounded to this dtype while they are read.
        on_host: Whether weights are first read into host memory, and moved to the device after `change`.
        weights: Weights on the host, by their names in files, to use instead of the files.

    Raises:
        ModelError: If the weights cannot be read or do not fit.
    """
    config = load_model_config(model)
    try:
        with quiet_loading(), finding("model.path", model.path):
            if weights is None and model.init == "random":
                torch.manual_seed(seed)
                causal = new_model(config, model, dtype=torch.float32)
            else:
                device = torch.device("cpu") if on_host else profile.device
                causal = _with_weights(model, config, device, narrow, weights)
    except (*LOADING_ERRORS, SafetensorError, EOFError) as error:
        # If the architecture itself cannot be built, this raises a clearer error.
        build_without_memory(config, model)
        raise ModelError(_loading_failed(model, error)) from error
    # The grouped matrix product of experts has no float64 kernel.
    causal.set_experts_implementation("eager" if profile.weight_dtype == torch.float64 else EXPERTS_NAME)
    _cast(causal, profile.weight_dtype, narrow)
    if change is not None:
        change(causal)
    nn.Module.to(causal, device=profile.device)
    return causal.train()


def _cast(causal: nn.Module, dtype: torch.dtype, narrow: torch.dtype | None) -> None:
    """Convert floating point weights and buffers to `dtype`, and matrices to `narrow` if given, one at a time."""
    matrices = {} if narrow is None else {id(module.weight): narrow for _, module in narrowable_modules(causal)}
    for parameter in causal.parameters():
        if parameter.is_floating_point():
            # Replace the data and keep the parameter, since two modules share a tied weight.
            parameter.data = parameter.data.to(matrices.get(id(parameter), dtype))
    for module in causal.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _with_weights(
    model: ModelConfig,
    config: PretrainedConfig,
    device: torch.device,
    narrow: torch.dtype | None,
    weights: Mapping[str, Tensor] | None,
) -> PreTrainedModel:
    files = safetensors_files(model) if weights is None else []
    if not files and weights is None:
        raise ModelError(
            f"model.path: {model.path} has no safetensors files on the hub. Weights in other files are pickles, which "
            "can run code when they are opened. Choose a revision or a model with safetensors files."
        )
    # Read as fp32 first, so that fp64 runs start from the same weights as fp32 runs.
    causal = build_without_memory(config, model, torch.float32)
    if narrow is not None:
        # Each weight is read in the dtype of its parameter.
        _cast(causal, torch.float32, narrow)
    found, loading = read_into(causal, slices_of(files) if weights is None else weights, device)
    begins = SCORE in found.missing_keys
    type(causal)._finalize_model_loading(causal, loading, found)
    if begins:
        nn.init.zeros_(causal.get_parameter(SCORE))
    check_loaded(model, found.missing_keys, found.mismatched_keys, found.unexpected_keys)
    if causal.can_generate():
        # Some models have no generation_config.json.
        with suppress(OSError):
            causal.generation_config = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    return causal


def read_into(
    causal: PreTrainedModel, weights: Mapping[str, Any], device: torch.device | str
) -> tuple[LoadStateDictInfo, LoadStateDictConfig]:
    """Read weights into a model on device `meta`. Each weight goes straight to `device`, in its parameter's dtype.

    `weights` are slices of safetensors files, or tensors, by their names in files. Returns the names of parameters that
    lack values or do not fit, and the settings of the loading.
    """
    loading = LoadStateDictConfig(
        # `check_loaded` reports weights of wrong shapes.
        ignore_mismatched_sizes=True,
        dtype=torch.float32,
        weight_mapping=cast(Any, get_model_conversion_mapping(causal)),
        device_map={"": device},
    )
    found, _ = convert_and_load_state_dict_in_model(causal, dict(weights), loading)
    for value in (*causal.parameters(), *causal.buffers()):
        # Copy values that are mapped from a file (not resizable), since the file may change. DTensors are left alone.
        if value.device.type == "cpu" and not isinstance(value, DTensor) and not value.untyped_storage().resizable():
            value.data = value.data.clone()
    return found, loading


def joined_weights(causal: PreTrainedModel, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert weights from their layout in files, such as a tensor for each expert, to the model's parameters.

    `weights` are as in `read_into`. `causal` is on device `meta` before and after. Returns the parameters that the
    weights give, on CPU, by their names in the model.
    """
    with quiet_loading():
        read_into(causal, weights, "cpu")
    found = {name: value.detach() for name, value in causal.named_parameters() if not value.is_meta}
    nn.Module.to(causal, device="meta")
    return found


def check_weights_fit(model: ModelConfig) -> None:
    """Raise ModelError if weights in a local folder are missing or have other shapes. Reads only file headers."""
    if model.init == "random" or not Path(model.path).is_dir():
        return
    causal = build_without_memory(load_model_config(model), model, torch.float32)
    layout = {name: tensor for path in safetensors_files(model) for name, tensor in layout_of(path).items()}
    try:
        with quiet_loading():
            found, loading = read_into(causal, layout, "meta")
            type(causal)._finalize_model_loading(causal, loading, found)
    except LOADING_ERRORS as error:
        raise ModelError(_loading_failed(model, error)) from error
    # Loading the model warns about unexpected weights.
    check_loaded(model, found.missing_keys, found.mismatched_keys, ())


def check_loaded(
    model: ModelConfig, missing_keys: Collection[str], mismatched: Collection[Any], unexpected_keys: Collection[str]
) -> None:
    """Raise ModelError unless the files had every weight in the right shape, and warn about unexpected weights.

    `mismatched` has a tuple (name, shape in the files, shape in the model) for each weight of another shape.
    """
    if model.head == "score":
        missing_keys = [name for name in missing_keys if name != SCORE]
        unexpected_keys = [name for name in unexpected_keys if not name.startswith("lm_head.")]
    fix = "Do config.json and the weights belong to the same model?"
    if model.config_overrides:
        fix = f"model.config_overrides changes {listing(model.config_overrides)}, which these weights do not fit."
    if mismatched:
        name, found, expected = sorted(mismatched, key=str)[0]
        raise ModelError(
            f"model.path: {len(mismatched)} weights of {model.path} have other shapes than its config asks for: {name} "
            f"is {tuple(found)} in the files and {tuple(expected)} in the model. {fix}"
        )
    if missing_keys:
        raise ModelError(
            f"model.path: the files of {model.path} lack {len(missing_keys)} weights that its config asks for, which "
            f"would stay random: {_some(missing_keys)}. {fix}"
        )
    # With overrides of the architecture, such as fewer layers, unused weights are intended.
    if unexpected_keys and not model.config_overrides:
        unused = f"{len(unexpected_keys)} weights of {model.path}"
        _logger.warning(f"model.path: {unused} are not in the model and are ignored: {_some(unexpected_keys)}.")


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def _loading_failed(model: ModelConfig, error: Exception) -> str:
    message = describe_missing("model.path", model.path, "weights", error, model.trust_remote_code)
    if model.init == "pretrained":
        message += "\nTo train this architecture from scratch, set model.init: random."
    if model.config_overrides:
        message += f"\nmodel.config_overrides changes {listing(model.config_overrides)}. Do the weights fit them?"
    return message


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the progress bars and tables of transformers in the context."""
    enabled, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if enabled:
            transformers_logging.enable_progress_bar()


def check_config(causal: PreTrainedModel, path: str, max_length: int) -> LengthLimit | None:
    """Check that the loss of this model does not depend on how samples form micro-batches.

    `max_length` is the largest number of tokens that a sample of the run may have. `path` is used in errors. Returns
    the limit on the length of samples, or None if any length is allowed.

    Raises:
        ModelError: If the loss would depend on micro-batches.
    """
    config, name = causal.config, f"model.path: {path} ({type(causal).__name__})"
    for part in (config, config.get_text_config()):
        if getattr(part, "output_router_logits", False):
            raise ModelError(
                f"{name} sets output_router_logits. transformers then adds an auxiliary loss over a batch. Its "
                "gradient depends on the micro-batches. Set model.config_overrides: {output_router_logits: false}. To "
                "balance routers by sequence, set model.router_aux_loss: config."
            )
    limit = length_limit(config)
    if limit is not None and max_length > limit.tokens:
        raise ModelError(
            f"{name} has rotary frequencies of type '{limit.rope_type}', which switch for all samples of a micro-batch "
            f"when the longest has more than {limit.tokens} tokens, and data.max_length allows {max_length}. "
            f"Set data.max_length: {limit.tokens} or less."
        )
    return limit
