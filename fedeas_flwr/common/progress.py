"""Log the progress of long work in a process without a terminal, such as a client's on a node."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fedeas_flwr.common.text import show_seconds

_LINE_EVERY = 30.0
"""Seconds between two lines on the same work."""


def log_progress(logger: logging.Logger, what: str) -> Callable[[int, int], None]:
    """Return a callback ``(done, total)`` that logs the start, the end, and every 30 seconds the time left."""
    began = shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if 0 < done < total and now - shown < _LINE_EVERY:
            return
        shown = now
        left = f", about {show_seconds((total - done) * (now - began) / done)} left" if 0 < done < total else ""
        logger.info("%s: %d of %d%s", what, done, total, left)

    return show
