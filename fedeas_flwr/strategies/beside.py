"""A thread for what need not hold a round up."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType


class Beside:
    """Does one piece of work at a time in a thread of its own; the block's end waits for it, however the block ends.

    What the work raises is raised by the next `wait`, or by the block's end: there also in place of an error of the
    block's own, which came later. Only an interruption goes before it.
    """

    def __enter__(self) -> Beside:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="beside-the-clients")
        self._work: Future[None] | None = None
        return self

    def start(self, work: Callable[[], None]) -> None:
        """Begin with ``work``; the piece before must have been waited for."""
        assert self._work is None
        self._work = self._pool.submit(work)

    def wait(self) -> float:
        """Wait until the work is done, if there is any; return the seconds it took to wait."""
        began = time.perf_counter()
        if self._work is not None:
            try:
                self._work.result()
            except Exception:  # the work's own, to be raised once; whoever is interrupted here has yet to wait
                self._work = None
                raise
            self._work = None
        return time.perf_counter() - began

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = error is not None and not isinstance(error, Exception)
        try:
            with suppress(*([Exception] if interrupted else [])):
                self.wait()
        finally:
            self._pool.shutdown()
