"""Texts from outside are fit for a log: one line, short, nothing that controls a terminal."""

from __future__ import annotations

import pickle

import pytest

from fedeas_flwr.common.errors import ConfigError, MessageError, RunError, RunFailedError
from fedeas_flwr.common.text import MAX_LINE, indented_lines, numbered, one_line

FORGED = "first\n2026-01-01 00:00:00 INFO all is well"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FORGED, "first 2026-01-01 00:00:00 INFO all is well"),
        ("a\r\nb\x85c\u2028d\x0be\x1cf\tg\u00a0h", "a b c d e f g h"),
        ("\x1b[2J\x1b[31mred\x07\x00", "�[2J�[31mred��"),
        ("\u202egnp.exe", "�gnp.exe"),
        ("\udc80", "�"),
        ("  a  b \n\n  c ", "a  b c"),
        ("Größe β 猫 …", "Größe β 猫 …"),
    ],
)
def test_one_line_has_no_breaks_and_no_control_characters(text: str, line: str) -> None:
    assert one_line(text) == line


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "round 3"),
        ([3, 4], "rounds 3, 4"),
        ([1, 2, 3, 7, 9, 10, 11, 12], "rounds 1–3, 7, 9–12"),
        ([1, 3, 5, 7, 9, 11], "rounds 1, 3, 5, 7, 9, 11"),
        ([1, 3, 5, 7, 9, 11, 13], "7 rounds"),
    ],
)
def test_numbered_shows_ranges_or_the_count(numbers: list[int], text: str) -> None:
    assert numbered("round", numbers) == text


def test_one_line_keeps_both_ends_of_a_long_text() -> None:
    line = one_line(f"key = {'x' * 5000}: must be short", MAX_LINE)
    assert len(line) == MAX_LINE == 600
    assert line.startswith("key = xxx") and line.endswith("xxx: must be short") and "x…x" in line
    assert one_line("x" * 600, 600) == "x" * 600


@pytest.mark.parametrize("kind", [ConfigError, RunError, RunFailedError, MessageError])
def test_errors_for_users_are_one_short_line(kind: type[Exception]) -> None:
    error = kind(FORGED + "\x1b" + "x" * 5000)
    assert "\n" not in str(error) and "\x1b" not in str(error) and len(str(error)) == MAX_LINE
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_indented_lines_cannot_be_taken_for_lines_of_the_log() -> None:
    assert indented_lines(FORGED + "\n  indented\x1b") == (
        "first\n  | 2026-01-01 00:00:00 INFO all is well\n  |   indented�"
    )
    assert len(indented_lines("x" * 30_000)) == 20_000 and indented_lines("") == ""
