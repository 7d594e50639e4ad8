"""Save and restore the state of any torch optimizer by parameter name, bit for bit and without pickle.

Tensors are named `PARAMETER/KEY`, such as `model.norm.weight/exp_avg`. Numbers are saved as JSON. If a value of a
parameter group has changed since the optimizer was made, it is saved as JSON too, except `lr`, which the schedule sets.
State tensors of a sharded parameter must be DTensors with its shape and sharding, or have a single value.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from spurline.errors import CheckpointError, CheckpointWriteError
from spurline.protocols.optimizer import Optimizer

PEAK = "initial_lr"
"""Key of a parameter group's peak learning rate, as in torch's own schedulers."""

_NOT_KEPT = ("params", "lr", PEAK)

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer as it is saved in a checkpoint.

    Attributes:
        tensors: Tensors by `PARAMETER/KEY`. If parameters are sharded, these are the shards of this process.
        optimizer: The optimizer's name in the config.
        values: JSON values by `PARAMETER/KEY`.
        groups: For each parameter group, the values that changed since the optimizer was made.
        shapes: Shape and dtype of each tensor, as `describe` gives them.
        on_host: Names of tensors in host memory that belong to parameters on a GPU.
    """

    tensors: Mapping[str, Tensor]
    optimizer: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: Groups = field(default_factory=list[dict[str, Any]])
    shapes: Mapping[str, str] = field(default_factory=dict[str, str])
    on_host: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return everything except the tensors, as JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "tensors"}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> OptimizerState:
        """Make a state from the tensors of a checkpoint and the result of `facts`."""
        return cls(tensors, **{**facts, "on_host": tuple(facts["on_host"])})


def describe(tensor: Tensor) -> str:
    """Return shape and dtype as text, such as `[48, 32] float32`."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def group_values(optimizer: Optimizer) -> Groups:
    """Return the settings of each parameter group of a new optimizer, for `take_state`."""
    return [{key: value for key, value in group.items() if key not in _NOT_KEPT} for group in optimizer.param_groups]


def take_state(name: str, optimizer: Optimizer, parameters: Mapping[str, Parameter], made: Groups) -> OptimizerState:
    """Return the current state. Its tensors are the optimizer's own, not copies.

    `name` is the optimizer's name in the config, and `made` is `group_values` of the new optimizer.

    Raises:
        CheckpointWriteError: If the state cannot be saved in a checkpoint.
    """
    names = {id(parameter): known for known, parameter in parameters.items()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    on_host: list[str] = []
    for parameter, state in optimizer.state.items():
        owner = names.get(id(parameter))
        if owner is None or not isinstance(state, Mapping):
            raise unsaveable(name, "state that belongs to no parameter", state)
        for key, value in state.items():
            place = f"{owner}/{key}"
            if not isinstance(key, str) or "/" in key:
                raise unsaveable(name, f"state of {owner} under the key {key!r} (keys are names without '/')", value)
            if isinstance(value, Tensor) and _fits(value, parameter):
                tensors[place] = value.detach()
                if value.device.type == "cpu" and parameter.device.type != "cpu":
                    on_host.append(place)
            elif is_plain(value):
                values[place] = value
            else:
                raise unsaveable(name, f"`{key}` of {owner}", value)
    shapes = {key: describe(tensor) for key, tensor in tensors.items()}
    return OptimizerState(tensors, name, values, changed_groups(name, optimizer, made), shapes, tuple(on_host))


def check_state(saved: OptimizerState, name: str, parameters: Container[str], made: Groups) -> None:
    """Raise CheckpointError unless the state is complete and fits parameters of these names."""
    if saved.optimizer != name:
        raise CheckpointError(
            f"the checkpoint has the state of optimizer {saved.optimizer}, and this run has {name}. Resume with the "
            "optimizer the checkpoint was made with."
        )
    for key in [*saved.tensors, *saved.values]:
        if key.rpartition("/")[0] not in parameters:
            raise CheckpointError(
                f"optimizer state {key} does not fit this run's parameters. Resume with the model and backend.lora the "
                "checkpoint was made with."
            )
    found = {key: describe(tensor) for key, tensor in saved.tensors.items()}
    for key in sorted({*found, *saved.shapes}):
        if found.get(key) != saved.shapes.get(key):
            raise CheckpointError(
                f"the optimizer state is damaged: {key} is {found.get(key, 'missing')}, and "
                f"{saved.shapes.get(key, 'nothing')} was saved. Resume from another checkpoint."
            )
    if saved.groups and len(saved.groups) != len(made):
        raise CheckpointError(
            f"the optimizer had {len(saved.groups)} parameter groups, and this run has {len(made)}. Resume with the "
            "settings of `groups` and weight_decay the checkpoint was made with."
        )


def put_state(saved: OptimizerState, optimizer: Optimizer, parameters: Mapping[str, Parameter], made: Groups) -> None:
    """Replace the optimizer's state with a saved state, bit for bit. `check_state` must have accepted it."""
    optimizer.state.clear()

    def put(key: str, value: object) -> None:
        name, _, part = key.rpartition("/")
        optimizer.state.setdefault(parameters[name], {})[part] = value

    on_host = set(saved.on_host)
    # Copy one tensor at a time, since a tensor may be read from its file only now.
    for key, tensor in saved.tensors.items():
        if not isinstance(tensor, DTensor):
            # Fused kernels need step counters on the device of the weights.
            device = "cpu" if key in on_host else parameters[key.rpartition("/")[0]].device
            tensor = tensor.to(device, copy=True)
        put(key, tensor)
    for key, value in saved.values.items():
        put(key, value)
    changed = saved.groups or [{} for _ in made]
    for group, before, values in zip(optimizer.param_groups, made, changed, strict=True):
        group.update({**before, **values})


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """Return whether a checkpoint can hold this tensor of a parameter's state."""
    if not isinstance(parameter, DTensor):
        return type(value) in (Tensor, Parameter)
    if isinstance(value, DTensor):
        return value.shape == parameter.shape and value.placements == parameter.placements
    # Only one rank saves this tensor. If it had several values, they might differ between ranks.
    return value.numel() == 1


def changed_groups(name: str, optimizer: Optimizer, made: Groups) -> Groups:
    """Return the values of each parameter group that changed since the optimizer was made.

    Raises:
        CheckpointWriteError: If the values cannot be saved in a checkpoint.
    """
    changed: Groups = []
    for now, before in zip(group_values(optimizer), made, strict=True):
        different = {key: value for key, value in now.items() if key not in before or not _same(value, before[key])}
        for key, value in different.items():
            if not is_plain(value):
                raise unsaveable(name, f"`{key}` of a parameter group", value)
        changed.append(different)
    return changed if any(changed) else []


def _same(value: object, before: object) -> bool:
    if isinstance(value, Tensor) or isinstance(before, Tensor):
        return value is before
    return type(value) is type(before) and value == before


def is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def unsaveable(name: str, what: str, value: object) -> CheckpointWriteError:
    """Return the error to raise for a state that cannot be saved in a checkpoint."""
    return CheckpointWriteError(
        f"optimizer '{name}' keeps {what} as {type(value).__name__}, which a checkpoint cannot hold. It can hold "
        "tensors, numbers, strings and None, but no tensors in parameter groups. Tensors of a sharded parameter must "
        "have its shape and sharding, or one value. Choose another optimizer."
    )
