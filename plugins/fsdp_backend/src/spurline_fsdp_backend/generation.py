"""Continue prompts on every rank with a whole copy of the model, gathered for as long as it takes.

Place on the way: prompts, dealt by length -> each rank decodes its own, without any exchange -> continuations in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from spurline.model.device_profile import DeviceProfile
from spurline.model.generation import generate_greedily
from spurline.model.stream_model import StreamModel
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_fsdp_backend.sharded_model import gathered

Tokens = Sequence[int]


def generate(
    model: StreamModel,
    config: FsdpBackendConfig,
    profile: DeviceProfile,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    stop_tokens: Sequence[int],
) -> list[list[int]]:
    """See `Generates`; of this rank's prompts, which may be none. A collective at its beginning and its end."""
    with gathered(model.causal, config), profile.computing():
        return generate_greedily(model.causal, prompts, max_new_tokens, stop_tokens) if prompts else []
