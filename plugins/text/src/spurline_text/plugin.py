"""Register the components of `text`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_text import configs

PLUGIN = Plugin("text", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_keeper("spurline_text.in_memory:Keeper")
    add = registry.add
    add(configs.HfDatasetConfig, "spurline_text.datasets.hf_dataset:HfDataset", default=True)
    add(configs.HfStreamConfig, "spurline_text.datasets.row_streams:HfStream")
    add(configs.SequentialTokenizationConfig, "spurline_text.tokenization:SequentialTokenization", default=True)
    add(configs.SftSourceConfig, "spurline_text.sources.sft:SftSource", default=True)
    add(configs.StreamSourceConfig, "spurline_text.sources.stream:StreamSource")
