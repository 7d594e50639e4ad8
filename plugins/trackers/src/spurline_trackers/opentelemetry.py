"""Send the metrics of each step as gauges and as one event, by OTLP over HTTP."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import OpenTelemetryTrackerConfig
from spurline_trackers.sending import SendingTracker, earlier_run_id, new_run_id, store_run_id, tracker_library

ID_FILE = "opentelemetry_run_id"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


class OpenTelemetryTracker(SendingTracker):
    """A tracker that sends gauges `spurline.NAME`, and one event `spurline.step` with all metrics as attributes."""

    name = "opentelemetry"
    fix = (
        "Start the receiver that trackers.opentelemetry.endpoint or OTEL_EXPORTER_OTLP_ENDPOINT names. It must take "
        "metrics and logs by OTLP over HTTP, usually at port 4318."
    )

    def __init__(self, config: OpenTelemetryTrackerConfig) -> None:
        super().__init__()
        library = partial(tracker_library, "opentelemetry")
        self._points = library("opentelemetry.sdk.metrics.export")
        self._logs = library("opentelemetry.sdk._logs")
        self._log_record = library("opentelemetry._logs").LogRecord
        self._severity = library("opentelemetry._logs").SeverityNumber
        self._resources = library("opentelemetry.sdk.resources")
        self._scopes = library("opentelemetry.sdk.util.instrumentation")
        self._log_exporter = library(f"{_EXPORTER}._log_exporter").OTLPLogExporter
        self._metric_exporter = library(f"{_EXPORTER}.metric_exporter").OTLPMetricExporter
        self._config = config

    def open_run(self, info: RunInfo) -> None:
        address = None if self._config.endpoint is None else self._config.endpoint.rstrip("/")
        timeout = self._config.timeout_s
        self._events = self._log_exporter(endpoint=address and f"{address}/v1/logs", timeout=timeout)
        self._gauges = self._metric_exporter(endpoint=address and f"{address}/v1/metrics", timeout=timeout)
        run_id = earlier_run_id(info, ID_FILE) or store_run_id(info.run_dir, ID_FILE, new_run_id(info.run_dir))
        attributes = {
            "service.name": self._config.service_name,
            "service.instance.id": run_id,
            "spurline.run": info.run_dir.resolve().name,
        }
        self._resource = self._resources.Resource.create(attributes)
        self._scope = self._scopes.InstrumentationScope("spurline")
        # The exporter would log failures that this tracker reports itself.
        logging.getLogger(_EXPORTER).setLevel(logging.CRITICAL)
        self._event("spurline.start", time.time_ns(), {"spurline.resume_step": info.resume_step})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.time_ns()
        values = {"step": float(step), **metrics}
        self._event("spurline.step", now, {f"spurline.{name}": value for name, value in values.items()})
        gauges = [self._gauge(instrument_name(name), value, now) for name, value in values.items()]
        scoped = self._points.ScopeMetrics(self._scope, gauges, "")
        whole = self._points.MetricsData([self._points.ResourceMetrics(self._resource, [scoped], "")])
        self._check(self._gauges.export(whole, timeout_millis=1000 * self._config.timeout_s))

    def close_run(self, *, is_finished: bool) -> None:
        self._events.shutdown()
        self._gauges.shutdown()

    def _event(self, name: str, when: int, attributes: Mapping[str, float]) -> None:
        severity, named = self._severity.INFO, {"body": name, "event_name": name, "attributes": dict(attributes)}
        record = self._log_record(timestamp=when, observed_timestamp=when, severity_number=severity, **named)
        entry = self._logs.ReadableLogRecord(record, self._resource, self._scope)
        self._check(self._events.export([entry]))

    def _gauge(self, name: str, value: float, when: int) -> Any:
        point = self._points.NumberDataPoint({}, 0, when, value)
        return self._points.Metric(name, "", "", self._points.Gauge([point]))

    def _check(self, result: Any) -> None:
        if result.name != "SUCCESS":
            raise ConnectionError(f"the receiver at {self._events._endpoint} cannot be reached or has refused the data")


def instrument_name(name: str) -> str:
    """Return `spurline.NAME`. Characters that OpenTelemetry does not allow become `_`."""
    return re.sub(r"[^A-Za-z0-9_./-]", "_", f"spurline.{name}")[:255]
