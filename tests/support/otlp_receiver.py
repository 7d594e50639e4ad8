"""A receiver of OTLP over HTTP on the loopback, which keeps all requests."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


class OtlpReceiver:
    """Use with `with`. is_down: answer 503 to everything."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.is_down = False
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    content = gzip.decompress(content)
                if not receiver.is_down:
                    receiver._take(self.path, content)
                self.send_response(503 if receiver.is_down else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpReceiver:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def runs(self) -> set[str]:
        """The `service.instance.id` of all metrics."""
        return {
            attribute.value.string_value
            for request in self.metrics
            for resource in request.resource_metrics
            for attribute in resource.resource.attributes
            if attribute.key == "service.instance.id"
        }

    def gauges(self, name: str) -> list[float]:
        """Return the values of a gauge, in order of arrival."""
        return [
            point.as_double
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.gauge.data_points
        ]

    def _take(self, path: str, content: bytes) -> None:
        assert path == "/v1/metrics", path
        self.metrics.append(ExportMetricsServiceRequest.FromString(content))
