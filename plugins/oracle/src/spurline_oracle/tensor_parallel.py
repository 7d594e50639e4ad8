"""Model missing and wrong sums over tensor-parallel ranks, and kinds of parameters that are scaled alone.

Each tensor-parallel rank has a part of the heads, of the features between the matrices of an MLP, and of the
vocabulary; with sequence parallelism it has a part of the tokens in norms. What is not sharded must be summed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spurline_models.architecture import output_layer
from spurline_oracle.truth import Gradients, Prediction, Reference

_SPLIT_OUTPUT = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)$")
_SPLIT_INPUT = re.compile(r"\.(o_proj|down_proj)$")
_HEADS = re.compile(r"\.(q_norm|k_norm|q_layernorm|k_layernorm)$")
_GATED = re.compile(r"\.linear_attn\.norm$")
_EXPERTS = re.compile(r"\.experts?\b")
_ROUTER = re.compile(r"\.(gate|router)\.")

_FACTORS = tuple(factor for size in (2, 3, 4, 8, 16, 32, 64) for factor in (float(size), 1 / size))

Replace = Callable[[nn.Module, tuple[Any, ...], Any], Tensor]
"""A function that gets a module, its arguments and its output, and returns another output."""


def scaled_kinds(reference: Reference) -> Iterable[Prediction]:
    """Scale the gradients of one kind of parameters."""
    truth, gradients = reference.truth, reference.recorded
    if reference.dump.facts["norms"]:
        return
    embedding, head = embedding_name(reference.causal), output_layer(reference.causal)
    norms = {f"{name}.{own}" for name, each in _norms(reference.causal) for own, _ in each.named_parameters()}
    kinds: dict[str, Callable[[str, Tensor], bool]] = {
        "norms": lambda name, value: name in norms,
        "norms of queries and keys": lambda name, value: _HEADS.search(name.rpartition(".")[0]) is not None,
        "biases": lambda name, value: name.endswith(".bias"),
        "experts": lambda name, value: _EXPERTS.search(name) is not None,
        "routers": lambda name, value: _ROUTER.search(f"{name}.") is not None,
        "embeddings": lambda name, value: name == embedding,
        "the output layer": lambda name, value: value is getattr(head, "weight", None),
    }
    parameters = dict(reference.causal.named_parameters())
    for kind, belongs in kinds.items():
        names = [name for name in gradients if belongs(name, parameters[name])]
        size = sum(float((truth[name] ** 2).sum()) for name in names)
        if not names or size == 0 or len(names) == len(truth):
            continue
        found = sum(float((gradients[name] * truth[name]).sum()) for name in names) / size
        factor = min(_FACTORS, key=lambda each: abs(found / each - 1))
        own = {name: factor * truth[name] for name in names}
        words = "All others are right. Over which ranks (tensor, sequence, expert) are these summed or averaged?"
        yield Prediction(f"gradients of {kind} scaled by {factor:g}", words, {**truth, **own})


def missing_sums_of_weights(reference: Reference) -> Iterable[Prediction]:
    """Leave out the sum over tensor-parallel ranks of the gradients of norms."""
    norms = dict(_norms(reference.causal))
    heads = {name: module for name, module in norms.items() if _HEADS.search(name)}
    gated = {name: module for name, module in norms.items() if _GATED.search(name)}
    others = {name: module for name, module in norms.items() if name not in heads | gated}
    kinds = {"norms": norms, "norms of queries and keys": heads, "norms of linear attention": gated}
    if heads or gated:
        kinds["norms of layers"] = others
    for size in _sizes(reference):
        for kind, modules in kinds.items():
            name = f"missing tensor-parallel sum of the gradients of {kind} ({size} ranks)"
            if modules:
                with each_forward(list(modules.values()), _of_first_rank(reference, size, set(heads.values()))):
                    yield reference.predict(name, "Each rank sees a part of the tokens or heads. They were not summed.")


def missing_sums_of_inputs(reference: Reference) -> Iterable[Prediction]:
    """Leave out the sum over tensor-parallel ranks of gradients that flow out of split matrices."""
    causal, head = reference.causal, output_layer(reference.causal)
    inner = [module for name, module in causal.named_modules() if _SPLIT_OUTPUT.search(name)]
    places = {"the layers": inner} if inner else {}
    if isinstance(head, nn.Linear):
        places["the output layer"] = [head]
    for size in _sizes(reference):
        for place, modules in places.items():
            of_ranks: list[Gradients] = []
            for rank in range(size):

                def replace(module: Any, inputs: Any, output: Tensor, rank: int = rank, size: int = size) -> Tensor:
                    features = torch.arange(output.shape[-1], device=output.device)
                    own = _is_part(output.shape[-1], features, rank, size)
                    return torch.where(own, output, module(inputs[0].detach()))

                with each_forward(modules, replace):
                    of_ranks.append(reference.gradient())
            words = f"Gradients of the inputs of {place} were not summed over tensor-parallel ranks in backward."
            gathered = {name: _gathered(name, [each[name] for each in of_ranks]) for name in reference.truth}
            yield Prediction(f"missing tensor-parallel sum behind {place} ({size} ranks)", words, gathered)


def gathered_logits(reference: Reference) -> Iterable[Prediction]:
    """Compute the loss of split vocabularies from logits that hold the whole vocabulary on each rank."""
    words = "Each rank took all logits for its part of the vocabulary. Do not gather them before a split cross entropy."
    # Other losses also read the values of log-probabilities, which such a stack has wrong in a way of its own.
    for size in _sizes(reference) if reference.dump.loss["name"] == "cross_entropy" else ():
        name = f"gathered logits in a vocabulary-parallel loss ({size} ranks)"
        yield reference.predict(name, words, vocabulary_parts=size)


def _sizes(reference: Reference) -> list[int]:
    layout = reference.dump.facts["layout"]
    return [layout["tensor"]] if "tensor" in layout else [2, 4]


def _norms(causal: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules whose parameters are vectors, such as norms."""
    leaves = {name: module for name, module in causal.named_modules() if not list(module.children())}
    return [(name, each) for name, each in leaves.items() if {value.dim() for value in each.parameters()} == {1}]


def _of_first_rank(reference: Reference, size: int, heads: set[nn.Module]) -> Any:
    """Return a function that lets gradients reach a module's weights from the part of the first rank alone."""

    def replace(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if module in heads:
            count, axis = output.shape[2], 2
            index = torch.arange(count, device=output.device)
        elif output.dim() == 2:
            # Gated norms of linear attention read a row for each head of each token.
            count, axis = max(len(output) // len(reference.reading[-1].where), 1), 0
            index = torch.arange(len(output), device=output.device) % count
        else:
            stretch = reference.reading[-1]
            count, axis = len(reference.dump.rows[stretch.row].tokens), 1
            index = torch.arange(stretch.where.start, stretch.where.stop, device=output.device)
        if output.dim() <= axis or output.shape[axis] != len(index):
            return output
        own = _is_part(count, index, 0, size)
        own = own.view([-1 if place == axis else 1 for place in range(output.dim())])
        return torch.where(own, output, without_weight_gradient(module, inputs, output))

    return replace


def _gathered(name: str, of_ranks: list[Tensor]) -> Tensor:
    """Join the parts of a sharded weight. The first rank's gradient stands for a weight that all ranks hold."""
    module = name.rpartition(".")[0]
    axis = 0 if _SPLIT_OUTPUT.search(module) or module == "lm_head" else 1 if _SPLIT_INPUT.search(module) else None
    if axis is None or of_ranks[0].dim() <= axis:
        return of_ranks[0]
    parts = [value.chunk(len(of_ranks), axis) for value in of_ranks]
    return torch.cat([parts[rank][rank] for rank in range(len(parts[0]))], axis)


@contextmanager
def each_forward(modules: Sequence[nn.Module], replace: Replace) -> Iterator[None]:
    """Replace the outputs of modules in the context. The calls of modules that `replace` makes stay as they are."""
    inside = False

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        nonlocal inside
        if inside:
            return None
        inside = True
        try:
            return replace(module, inputs, output)
        finally:
            inside = False

    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def without_weight_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
    """Return the output of a module, from which no gradient flows to its own parameters."""
    return functional_call(module, {name: value.detach() for name, value in module.named_parameters()}, inputs)


def _is_part(count: int, index: Tensor, part: int, parts: int) -> Tensor:
    """Return whether each index of `count` things belongs to one of `parts` equal parts."""
    size = -(-count // parts)
    return (index >= part * size) & (index < (part + 1) * size)


def embedding_name(causal: Any) -> str | None:
    """Return the name of the weight of the input embeddings, or None without one."""
    weight = getattr(causal.get_input_embeddings(), "weight", None)
    return next((name for name, value in causal.named_parameters() if value is weight), None)
