"""Register the trackers. This module imports neither torch nor the trackers' libraries."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_trackers import configs

PLUGIN = Plugin("trackers", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    add = registry.add
    add(configs.TensorboardTrackerConfig, "spurline_trackers.tensorboard:TensorboardTracker")
    add(configs.WandbTrackerConfig, "spurline_trackers.projects:WandbTracker")
    add(configs.MlflowTrackerConfig, "spurline_trackers.mlflow:MlflowTracker")
    add(configs.TrackioTrackerConfig, "spurline_trackers.projects:TrackioTracker")
    add(configs.SwanlabTrackerConfig, "spurline_trackers.projects:SwanlabTracker")
    add(configs.OpenTelemetryTrackerConfig, "spurline_trackers.opentelemetry:OpenTelemetryTracker")
    add(configs.PrometheusTrackerConfig, "spurline_trackers.prometheus:PrometheusTracker")
