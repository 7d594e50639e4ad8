"""Serve the latest value of each metric for Prometheus."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from spurline.errors import ConfigError, Problem
from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import PrometheusTrackerConfig
from spurline_trackers.sending import tracker_library


class PrometheusTracker:
    """A tracker that serves `/metrics` until the run ends."""

    def __init__(self, config: PrometheusTrackerConfig) -> None:
        self._library = tracker_library("prometheus", "prometheus_client")
        self._config = config
        self._server: Any = None
        self._thread: Any = None
        self._registry = self._library.CollectorRegistry()
        self._gauges: dict[str, Any] = {}

    def start(self, info: RunInfo) -> None:
        """Listen for scrapes. Raises ConfigError if the port is taken."""
        run = self._library.Info("spurline_run", "The run.", registry=self._registry)
        run.info({"name": info.run_dir.resolve().name})
        self._show("planned_steps", info.total_steps)
        host, port = self._config.host, self._config.port
        try:
            self._server, self._thread = self._library.start_http_server(port, host, self._registry)
        except OSError as error:
            text = (
                f"'prometheus' cannot listen on {host}:{port}: {error.strerror or error}. Set another port "
                "(trackers.prometheus.port), or stop the program that uses this one."
            )
            raise ConfigError([Problem("trackers", text)]) from error
        print(f"prometheus: metrics at http://{host}:{port}/metrics", file=sys.stderr, flush=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the values of one step. Metrics that the step does not have keep their last value."""
        for name, value in {**metrics, "step": step}.items():
            self._show(name, value)

    def flush(self) -> None:
        """Do nothing, since a scrape reads the current values."""

    def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            self._thread.join(5.0)

    def _show(self, name: str, value: float) -> None:
        public = f"spurline_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
        if public not in self._gauges:
            text = f"Spurline's metric {name}."
            self._gauges[public] = self._library.Gauge(public, text, registry=self._registry)
        self._gauges[public].set(value)
