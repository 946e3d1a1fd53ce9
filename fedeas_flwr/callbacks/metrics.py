"""Serve a run's progress at http://127.0.0.1:PORT/metrics, in Prometheus' text format."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from logging import INFO
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig

log = logging.getLogger("flwr").log


class MetricsEndpoint:
    """Serves the values of the last round, and sums over all rounds, on the loopback interface.

    Port 0 is any free port, which the log names.
    """

    needs_network = True
    """A private network namespace has its own loopback interface, which nobody else can reach."""

    def __init__(self, port: int = 9464) -> None:
        if type(port) is not int or not 0 <= port <= 65_535:
            raise ConfigError(f"callbacks = 'metrics(port={port})': port must be 0 ≤ n ≤ 65,535")
        self._port = port
        self._server: _Server | None = None
        self._last: Mapping[str, Any] | None = None
        self._refused = 0
        self._seconds: dict[str, float] = {}

    def on_run_start(self, config: RunConfig, rounds: Sequence[Mapping[str, Any]]) -> None:
        """Start to listen; the sums include the ``rounds`` already done."""
        self._config = config
        for record in rounds:
            self._add(record)
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.text = self._text()
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log(INFO, "metrics: http://127.0.0.1:%d/metrics", self._server.server_address[1])

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Update the values."""
        self._add(record)
        if self._server is not None:
            self._server.text = self._text()

    def close(self) -> None:
        """Stop to listen."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _add(self, record: Mapping[str, Any]) -> None:
        self._last = record
        self._refused += len(record["failures"])
        for phase, seconds in record["seconds"].items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        last = self._last
        yield from _family("rounds_planned", "gauge", "Rounds of the run-config.", self._config.rounds)
        yield from _family("rounds_done", "gauge", "Last recorded round.", last["round"] if last else 0)
        yield from _family("replies_refused_total", "counter", "Replies missing, failed or rejected.", self._refused)
        yield "# HELP fedeas_seconds_total Seconds of all rounds by phase; phases may overlap."
        yield "# TYPE fedeas_seconds_total counter"
        yield from (f'fedeas_seconds_total{{phase="{phase}"}} {value!r}' for phase, value in self._seconds.items())
        if last:
            present = self._config.clients - last.get("not_joined", 0)
            if "accuracy" in last:  # of a classifier
                yield from _family("accuracy", "gauge", "Test accuracy of the last recorded round.", last["accuracy"])
            yield from _family("clients_present", "gauge", "Clients that have joined.", present)
            yield from _family("images_generated_total", "counter", "Images generated.", last["generated"])


def _family(name: str, kind: str, meaning: str, value: float) -> Iterator[str]:
    yield f"# HELP fedeas_{name} {meaning}"
    yield f"# TYPE fedeas_{name} {kind}"
    yield f"fedeas_{name} {value!r}"


class _Server(ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    text = ""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: Any) -> None:
        """Log nothing: a scrape every few seconds is no event."""
