"""Settings of the trackers. This module does not import the trackers' libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from spurline.protocols.tracker import TrackerConfig


class TensorboardTrackerConfig(TrackerConfig):
    """TensorBoard event files in RUN_DIR/tensorboard. Needs `pip install spurline-trackers[tensorboard]`."""

    name: str = "tensorboard"


class ServiceTrackerConfig(TrackerConfig):
    """Settings of a service that stores many runs."""

    run_name: str | None = None
    """Display name. The default is the name of the run directory."""

    def display_name(self, run_dir: Path) -> str:
        """Return the name that the service shows for the run of this directory."""
        return self.run_name or run_dir.resolve().name


class ProjectTrackerConfig(ServiceTrackerConfig):
    """Settings of a service that stores runs in projects."""

    project: str = "spurline"
    """The project of the run."""


class WandbTrackerConfig(ProjectTrackerConfig):
    """Weights & Biases. Needs `pip install spurline-trackers[wandb]`. A resumed run continues the same W&B run."""

    name: str = "wandb"
    entity: str | None = None
    """W&B team or user."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` writes to the disk, for a later `wandb sync`."""


class MlflowTrackerConfig(ServiceTrackerConfig):
    """MLflow. Needs `pip install spurline-trackers[mlflow]`. A resumed run continues the same MLflow run."""

    name: str = "mlflow"
    tracking_uri: str | None = None
    """A server (`http://127.0.0.1:5000`) or a database (`sqlite:///mlflow.db`). The default is MLFLOW_TRACKING_URI. If
    that is not set, MLflow uses a database in the working directory."""
    experiment: str = "spurline"
    """MLflow experiment. It is created if it does not exist."""
    tags: dict[str, str] = {}
    """Tags of the run."""


class TrackioTrackerConfig(ProjectTrackerConfig):
    """Trackio. Needs `pip install spurline-trackers[trackio]`. A resumed run continues the same Trackio run."""

    name: str = "trackio"
    run_name: str | None = None
    """Beginning of the run's name; random characters follow. The default is the name of the run directory."""
    group: str | None = None
    """Group of the run."""
    space_id: str | None = None
    """Space on the Hugging Face hub (`user/space`) that metrics are sent to. By default they are written to a database
    on this machine, in TRACKIO_DIR or in the cache of the library `huggingface_hub`."""
    private: bool = True
    """Make a new Space visible only to its owner."""


class SwanlabTrackerConfig(ProjectTrackerConfig):
    """SwanLab. Needs `pip install spurline-trackers[swanlab]`. A resumed run continues the same SwanLab experiment."""

    name: str = "swanlab"
    workspace: str | None = None
    """SwanLab user or organization."""
    mode: Literal["online", "offline", "local"] = "online"
    """`offline` and `local` write to RUN_DIR/swanlab: `offline` for `swanlab sync`, `local` for `swanlab watch`."""
    tags: tuple[str, ...] = ()
    """Tags of the experiment."""


class OpenTelemetryTrackerConfig(TrackerConfig):
    """OTLP over HTTP, to a collector or a service. Needs `pip install spurline-trackers[opentelemetry]`."""

    name: str = "opentelemetry"
    endpoint: str | None = None
    """Address without `/v1/metrics`. The default is OTEL_EXPORTER_OTLP_ENDPOINT, or else `http://localhost:4318`.
    Headers, for example with API keys, can be set only in OTEL_EXPORTER_OTLP_HEADERS."""
    service_name: str = "spurline"
    """The resource attribute `service.name`."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one request in seconds."""


class PrometheusTrackerConfig(TrackerConfig):
    """An address that Prometheus scrapes during the run. Needs `pip install spurline-trackers[prometheus]`."""

    name: str = "prometheus"
    host: str = "127.0.0.1"
    """Address to listen on. Anyone who can connect to it can read the metrics."""
    port: int = Field(default=9464, gt=0, lt=65536)
    """Port of `/metrics`. Runs on one machine need different ports."""
