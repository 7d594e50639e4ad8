"""Run the first of many ranks alone, with a fake process group, and write down the exchanges of training steps.

Usage: python lone_rank.py MODEL '{"name": "fsdp", "ranks": 8, ...}' ... prints a JSON list of `Exchange`s per backend.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spurline_models.dealing import deal
from spurline_ranks.group import Place
from spurline_ranks.messages import plain_objective, plain_run
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run

LENGTHS = (32,) * 64


class Exchange(NamedTuple):
    """What a rank does at the time, what it exchanges with how many ranks, and the size of the undivided tensor."""

    work: str
    operation: str
    ranks: int
    dtype: str
    num_bytes: int


class Exchanges(TorchDispatchMode):
    """Lists the exchanges of this process while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.work = ""
        self.found: list[Exchange] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            leaves = tree_leaves(args)
            whole = max((leaf for leaf in leaves if isinstance(leaf, Tensor)), key=lambda tensor: tensor.nbytes)
            [group] = [leaf for leaf in leaves if "ProcessGroup" in str(getattr(leaf, "_type", str)())]
            ranks = dist.ProcessGroup.unbox(group).size()
            self.found.append(Exchange(self.work, name, ranks, str(whole.dtype), whole.nbytes))
        return func(*args, **(kwargs or {}))


def exchanges_of(model: Path, backend: dict[str, Any]) -> list[Exchange]:
    """Return the exchanges of one step of this backend's first rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=backend["ranks"])
    loaded = backend_run(model, {"device": "cpu", "probe": False, **backend}, (f"{backend['name']}_backend",))
    config: Any = loaded.config.backend
    exchanges = Exchanges()
    place = Place(0, backend["ranks"], 0, "here", lambda work: setattr(exchanges, "work", work))
    rank = resolve_name(config.worker)(place, plain_run(loaded.config), 8)
    rank.build()
    batch, objective = minibatch("packed", config.layout(), lengths=LENGTHS)
    dealing = deal(batch, config.layout().data, max_tokens=config.max_tokens_per_microbatch)
    with exchanges:
        rank.update(dealing.shares[0].to_wire(), plain_objective(objective), "policy")
    dist.destroy_process_group()
    return exchanges.found


if __name__ == "__main__":
    folder, *backends = sys.argv[1:]
    print(json.dumps([exchanges_of(Path(folder), json.loads(backend)) for backend in backends]))
