"""Register the parts of `ranks`. This module imports neither torch nor transformers."""

from __future__ import annotations

from typing import Annotated

from spurline.config.section import OnResume, SchemaOfShorthand
from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_ranks.cluster import ClusterConfig

PLUGIN = Plugin("ranks", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_section(
        "cluster",
        Annotated[ClusterConfig, OnResume.FREE, SchemaOfShorthand(None)],
        held="spurline_ranks.cluster:room_on_cluster",
    )
