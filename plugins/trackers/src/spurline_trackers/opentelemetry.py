"""Send the metrics of each step as gauges, by OTLP over HTTP."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from functools import partial

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import OpenTelemetryTrackerConfig
from spurline_trackers.sending import SendingTracker, kept_run_id, new_run_id, tracker_library

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


class OpenTelemetryTracker(SendingTracker):
    """A tracker that sends gauges `spurline.NAME`, and the step as gauge `spurline.step`."""

    name = "opentelemetry"
    fix = (
        "Start the receiver that trackers.opentelemetry.endpoint or OTEL_EXPORTER_OTLP_ENDPOINT names. It must take "
        "metrics by OTLP over HTTP, usually at port 4318."
    )

    def __init__(self, config: OpenTelemetryTrackerConfig) -> None:
        super().__init__()
        library = partial(tracker_library, "opentelemetry")
        self._points = library("opentelemetry.sdk.metrics.export")
        self._resources = library("opentelemetry.sdk.resources")
        self._scopes = library("opentelemetry.sdk.util.instrumentation")
        self._exporter_class = library(f"{_EXPORTER}.metric_exporter").OTLPMetricExporter
        self._config = config

    def open_run(self, info: RunInfo) -> None:
        address = None if self._config.endpoint is None else f"{self._config.endpoint.rstrip('/')}/v1/metrics"
        self._exporter = self._exporter_class(endpoint=address, timeout=self._config.timeout_s)
        attributes = {
            "service.name": self._config.service_name,
            "service.instance.id": kept_run_id(info, "opentelemetry_run_id", partial(new_run_id, info.run_dir)),
            "spurline.run": info.run_dir.resolve().name,
        }
        self._resource = self._resources.Resource.create(attributes)
        self._scope = self._scopes.InstrumentationScope("spurline")
        # The exporter would log failures that this tracker reports itself.
        logging.getLogger(_EXPORTER).setLevel(logging.CRITICAL)
        # Send only the step, to find out whether there is a receiver.
        self.write(info.resume_step, {})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now, points = time.time_ns(), self._points
        gauges = [
            points.Metric(instrument_name(name), "", "", points.Gauge([points.NumberDataPoint({}, 0, now, value)]))
            for name, value in {"step": float(step), **metrics}.items()
        ]
        scoped = points.ScopeMetrics(self._scope, gauges, "")
        whole = points.MetricsData([points.ResourceMetrics(self._resource, [scoped], "")])
        result = self._exporter.export(whole, timeout_millis=1000 * self._config.timeout_s)
        if result.name != "SUCCESS":
            address = self._exporter._endpoint
            raise ConnectionError(f"the receiver at {address} cannot be reached or has refused the data")

    def close_run(self, *, is_finished: bool) -> None:
        self._exporter.shutdown()


def instrument_name(name: str) -> str:
    """Return `spurline.NAME`. Characters that OpenTelemetry does not allow become `_`."""
    return re.sub(r"[^A-Za-z0-9_./-]", "_", f"spurline.{name}")[:255]
