"""OpenTelemetry: each step's metrics as gauges, and one event, over OTLP/HTTP.

A receiver cannot be asked what it holds, so RUN_DIR/opentelemetry.jsonl remembers what was sent. A kill between a
request and its answer is the one case in which a step may come twice: then with the same run, step and time, by which
receivers tell that it is the same. The library is imported when the tracker is built, not when this module is.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from spurline.errors import ConfigError, Problem
from spurline.files import own_file, replace_file
from spurline.protocols.tracker import RunInfo
from spurline.trackers.jsonl import read_json_lines
from spurline_trackers.configs import OpenTelemetryTrackerConfig
from spurline_trackers.library import tracker_library
from spurline_trackers.run_id import stored_run_id
from spurline_trackers.sending import NO_STEP, LastStep, SendingTracker

ID_FILE = "opentelemetry_run_id"
"""Name of the file inside the run directory that holds the resource's `service.instance.id`."""
SENT_FILE = "opentelemetry.jsonl"
"""Name of the file inside the run directory that says what was sent: a line before each step, after its event and
after its gauges."""
_SCOPE = "spurline"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


class OpenTelemetryTracker(SendingTracker):
    """Send gauges `spurline.NAME`, and an event `spurline.step` with the step and all metrics as attributes."""

    name = "opentelemetry"
    fix = (
        "Start the receiver that trackers.opentelemetry.endpoint or OTEL_EXPORTER_OTLP_ENDPOINT names; it has to take "
        "metrics and logs, as OTLP over HTTP."
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
        if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http").startswith("grpc") and config.endpoint is None:
            text = (
                "'opentelemetry' speaks OTLP over HTTP, but OTEL_EXPORTER_OTLP_PROTOCOL is grpc. Set "
                "trackers.opentelemetry.endpoint to the receiver's address for HTTP, usually port 4318."
            )
            raise ConfigError([Problem("trackers", text)])
        self._config = config
        self._sent: IO[bytes] | None = None
        self._current = {"step": NO_STEP, "time": 0, "done": 0}

    def open_run(self, info: RunInfo) -> LastStep:
        address = None if self._config.endpoint is None else self._config.endpoint.rstrip("/")
        timeout = self._config.timeout_s
        self._events = self._log_exporter(endpoint=address and f"{address}/v1/logs", timeout=timeout)
        self._gauges = self._metric_exporter(endpoint=address and f"{address}/v1/metrics", timeout=timeout)
        attributes = {
            "service.name": self._config.service_name,
            "service.instance.id": stored_run_id(info.run_dir, ID_FILE, is_resumed=info.is_resumed),
            "spurline.run": info.run_dir.resolve().name,
        }
        self._resource = self._resources.Resource.create(attributes)
        self._scope = self._scopes.InstrumentationScope(_SCOPE)
        # What the exporter logs about a failure is said by this tracker, once.
        logging.getLogger(_EXPORTER).setLevel(logging.CRITICAL)
        self._event("spurline.start", time.time_ns(), {"spurline.resume_step": info.resume_step})
        path = info.run_dir / SENT_FILE
        last = self._take_up(path) if info.is_resumed else NO_STEP
        replace_file(path, json.dumps(self._current) + "\n" if self._current["step"] != NO_STEP else "")
        self._sent = open(path, "ab", buffering=0, opener=own_file)  # noqa: SIM115 - closed by `close`
        return lambda name: last

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._current["step"] != step:
            self._remember(step=step, time=time.time_ns(), done=0)
        when = self._current["time"]
        if self._current["done"] < 1:
            values = {"spurline.step": step, **{f"spurline.{name}": float(metrics[name]) for name in metrics}}
            self._event("spurline.step", when, values)
            self._remember(step=step, time=when, done=1)
        gauges = [self._gauge("spurline.step", step, when)]
        gauges += [self._gauge(instrument_name(name), float(value), when) for name, value in metrics.items()]
        scoped = self._points.ScopeMetrics(self._scope, gauges, "")
        whole = self._points.MetricsData([self._points.ResourceMetrics(self._resource, [scoped], "")])
        self._check(self._gauges.export(whole, timeout_millis=1000 * self._config.timeout_s))
        self._remember(step=step, time=when, done=2)

    def close_run(self, *, is_finished: bool) -> None:
        self._events.shutdown()
        self._gauges.shutdown()
        if self._sent is not None:
            self._sent.close()

    def _take_up(self, path: Path) -> int:
        """Read what an earlier attempt sent. Returns the last step that needs no more sending."""
        lines = read_json_lines(path)
        if not lines:
            return NO_STEP
        self._current = {key: int(lines[-1][key]) for key in ("step", "time", "done")}
        return self._current["step"] - (self._current["done"] < 2)

    def _remember(self, **stage: int) -> None:
        assert self._sent is not None
        self._sent.write((json.dumps(stage) + "\n").encode())
        self._current = stage

    def _event(self, name: str, when: int, attributes: Mapping[str, float]) -> None:
        record = self._log_record(
            timestamp=when,
            observed_timestamp=when,
            severity_number=self._severity.INFO,
            body=name,
            attributes=dict(attributes),
            event_name=name,
        )
        entry = self._logs.ReadableLogRecord(record, self._resource, self._scope)
        self._check(self._events.export([entry]))

    def _gauge(self, name: str, value: float, when: int) -> Any:
        point = self._points.NumberDataPoint({}, 0, when, value)
        return self._points.Metric(name, "", "", self._points.Gauge([point]))

    def _check(self, result: Any) -> None:
        if result.name != "SUCCESS":
            raise ConnectionError(f"the receiver at {self._events._endpoint} did not take it")


def instrument_name(name: str) -> str:
    """`spurline.NAME`, with characters that OpenTelemetry does not allow as `_`."""
    return re.sub(r"[^A-Za-z0-9_./-]", "_", f"spurline.{name}")[:255]
