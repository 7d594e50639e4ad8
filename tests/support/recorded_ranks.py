"""An FSDP2 loop on the ranks that torchrun starts, which records one update: `recorded_ranks.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from small_stacks import batches, model_of, num_learned, summed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from spurline_oracle.recorder import GradientRecorder


def main() -> None:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model, found = model_of("gemma"), batches(lengths=((9, 14), (20, 16), (11, 5), (14, 8)))
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    recorder = GradientRecorder(model, Path(sys.argv[1]))
    # FSDP averages gradients over ranks.
    total = num_learned(found) / 2
    for batch in found[mesh.get_local_rank() :: 2]:
        recorder.micro_batch(**batch)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        (summed(logits.float(), batch["labels"]) / total).backward()
    recorder.save()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
