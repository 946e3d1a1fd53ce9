"""Log lines on long work: few, with the time left."""

from __future__ import annotations

import logging

import pytest

from fedeas_flwr.common import progress


def test_progress_is_logged_at_both_ends_and_every_30_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, "fedeas_flwr")
    show = progress.log_progress(logging.getLogger("fedeas_flwr.test"), "client 3: images generated")
    for done in (0, 10, 20, 30, 40):
        show(done, 40)
        now += 20
    assert caplog.messages == [
        "client 3: images generated: 0 of 40",
        "client 3: images generated: 20 of 40, about 40 s left",
        "client 3: images generated: 40 of 40",
    ]
