"""`fedeas reproduce --into`: tables between two lines of a document, and all else as it was."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import runners
from records import record

from fedeas_flwr.reproduce.cells import PAPERS

into = partial(runners.typed, "reproduce", "--into", "doc.md", "--runs", "records")
DOCUMENT = f"before\n<!-- reproduce {PAPERS}/fedavg -->\nold\n<!-- end -->\nafter\n"
FILLED = "| Cell | Ours, last-20 % | Seeds |"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with one record."""
    record(tmp_path / "records" / "fedavg", f"{PAPERS}/fedavg", 1, [0.5] * 10, "smoke")
    return tmp_path


def test_cells_and_tables_are_written_and_what_is_around_them_stays(place: Path) -> None:
    words = f"<!-- reproduce ablation -->\n<!-- end --> between\n{DOCUMENT}"
    (place / "doc.md").write_text(words)
    done = into(cwd=place)
    assert done.returncode == 0, done.stderr
    text = (place / "doc.md").read_text()
    assert "<!-- reproduce ablation -->\n\n| Variant |" in text and "<!-- end --> between\nbefore\n" in text
    assert FILLED in text and f"| {PAPERS}/fedavg | 50.00 | 1 | 55.52 |" in text
    assert "old" not in text and text.endswith("\n\n<!-- end -->\nafter\n")
    into(cwd=place)
    assert (place / "doc.md").read_text() == text


def test_records_that_cannot_be_read_are_named_once_and_the_others_are_written(place: Path) -> None:
    damaged = record(place / "records" / "damaged", f"{PAPERS}/fedavg", 2, [0.5] * 10, "smoke")
    (damaged / "config.json").write_text('{"config": {"see')
    (place / "doc.md").write_text(DOCUMENT + DOCUMENT)
    done = into(cwd=place)
    assert (done.returncode, done.stdout) == (0, "doc.md\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("Unreadable: records/damaged: records/damaged/config.json is not JSON")
    assert (place / "doc.md").read_text().count(f"| {PAPERS}/fedavg | 50.00 | 1 | 55.52 |") == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            f"a\n<!-- reproduce beta -->\nprose\n{DOCUMENT}",
            "doc.md, line 2: '<!-- reproduce beta -->' has no '<!-- end",
        ),
        (
            f"{DOCUMENT}<!-- reproduce beta -->",
            "doc.md, line 6: '<!-- reproduce beta -->' has no '<!-- end -->' of its",
        ),
        (DOCUMENT + DOCUMENT.replace(f"{PAPERS}/fedavg", "table1 fig1"), "doc.md, line 7: 'fig1' is a figure"),
        (DOCUMENT.replace("/fedavg", ""), f"doc.md, line 2: '{PAPERS}' is a column: say what of it"),
        (DOCUMENT.replace(f" {PAPERS}/fedavg", ""), "doc.md, line 2: say what"),
        (DOCUMENT.replace("/fedavg", "/nothing"), f"doc.md, line 2: cell '{PAPERS}/nothing': there is none"),
        ("no place at all\n", "doc.md has no lines '<!-- reproduce table1 COLUMN -->' and '<!-- end -->'"),
    ],
)
def test_a_place_that_cannot_be_filled_is_refused_with_its_line_and_nothing_is_written(
    place: Path, text: str, says: str
) -> None:
    (place / "doc.md").write_text(text)
    done = into(cwd=place)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1
    assert (place / "doc.md").read_text() == text


def test_the_file_stays_what_it_was(place: Path) -> None:
    """A link a link, for those it is for, and with the line ends of its editor."""
    (place / "elsewhere").mkdir()
    real = place / "elsewhere" / "real.md"
    real.write_bytes(DOCUMENT.replace("\n", "\r\n").encode())
    real.chmod(0o640)
    (place / "doc.md").symlink_to(real)
    done = into(cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "doc.md").is_symlink() and real.stat().st_mode & 0o777 == 0o640
    content = real.read_bytes()
    assert FILLED.encode() in content and content.count(b"\n") == content.count(b"\r\n")
    assert os.listdir(real.parent) == ["real.md"]


def test_a_file_that_is_no_text_is_named(place: Path) -> None:
    (place / "doc.md").write_bytes(b"\xff" + DOCUMENT.encode())
    done = into(cwd=place)
    assert (done.returncode, done.stderr) == (2, "error: into = 'doc.md': must be UTF-8, and byte 0 is not\n")
