"""An address that Prometheus scrapes: the latest value of each metric, the step, and counters of steps and tokens.

Counters go on after a resume where the run does. Nothing is kept here: Prometheus holds what it has scraped. The
library is imported when the tracker is built, not when this module is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from spurline.errors import ConfigError, Problem
from spurline.protocols.tracker import RunInfo
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_trackers.configs import PrometheusTrackerConfig
from spurline_trackers.library import tracker_library

_STOP_WAIT_S = 5.0
_NOTHING_YET: dict[str, float] = {"step": 0.0, "steps_total": 0.0, "tokens_total": 0.0}
# As OpenMetrics, which Prometheus asks for, a counter is named without `_total`, and a name belongs to one metric.
_FAMILIES_OF_COUNTERS = ("spurline_steps", "spurline_tokens")


class PrometheusTracker:
    """Serve `/metrics` from the start of the run to its end."""

    def __init__(self, config: PrometheusTrackerConfig) -> None:
        self._library = tracker_library("prometheus", "prometheus_client")
        self._families = tracker_library("prometheus", "prometheus_client.core")
        self._config = config
        self._server: Any = None
        self._thread: Any = None
        self._run = ""
        self._total_steps = 0
        # A scrape comes on another thread; each step replaces this as a whole.
        self._values = dict(_NOTHING_YET)

    def start(self, info: RunInfo) -> None:
        """Listen. Raises ConfigError when the port is taken."""
        assert self._server is None, "PrometheusTracker is already started"
        self._run, self._total_steps = info.run_dir.resolve().name, info.total_steps
        self._values = dict(_NOTHING_YET)
        for line in read_metrics(info.run_dir / METRICS_FILE) if info.is_resumed else []:
            if line["step"] <= info.resume_step:
                self.log(int(line["step"]), line)
        registry = self._library.CollectorRegistry()
        registry.register(self)
        host, port = self._config.host, self._config.port
        try:
            self._server, self._thread = self._library.start_http_server(port, host, registry)
        except OSError as error:
            text = (
                f"'prometheus' cannot listen on {host}:{port}: {error.strerror or error}. Give another port "
                "(trackers.prometheus.port), or stop what has this one."
            )
            raise ConfigError([Problem("trackers", text)]) from error
        print(f"prometheus: metrics at http://{host}:{port}/metrics", file=sys.stderr, flush=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step from here on; metrics that it lacks keep their last value."""
        latest = {name: float(value) for name, value in metrics.items()}
        totals = {
            "step": float(step),
            "steps_total": self._values["steps_total"] + (step > 0),  # step 0 is an evaluation before training
            "tokens_total": self._values["tokens_total"] + latest.get("tokens", 0.0),
        }
        self._values = {**self._values, **latest, **totals}

    def flush(self) -> None:
        """Nothing to do: what a scrape reads is there."""

    def close(self) -> None:
        """Stop listening. May be called twice, or without start."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            self._thread.join(_STOP_WAIT_S)

    def collect(self) -> Iterator[Any]:
        """What one scrape reads; called by the library."""
        values = self._values
        yield self._families.InfoMetricFamily("spurline_run", "The run that is measured.", {"name": self._run})
        steps = self._families.GaugeMetricFamily("spurline_planned_steps", "Steps of the whole run.")
        steps.add_metric([], self._total_steps)
        yield steps
        names = {"spurline_run", "spurline_planned_steps"}
        for name, value in values.items():
            is_counter = name in ("steps_total", "tokens_total")
            public = f"spurline_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if not is_counter and public in _FAMILIES_OF_COUNTERS:
                public += "_of_step"
            if public in names:
                continue
            names.add(public)
            family = self._families.CounterMetricFamily if is_counter else self._families.GaugeMetricFamily
            shown = family(public, f"Spurline's metric {name}." if not is_counter else "Since the run began.")
            shown.add_metric([], value)
            yield shown
