"""Measured numbers on the pages are only written by `fedeas reproduce --into`, from the records."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedeas_flwr.reproduce.documents import NUMBER, filled_document

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "results").rglob("*.md"))
    if "<!-- reproduce " in path.read_text() or NUMBER.search(path.read_text())
)
GENERATED = re.compile(r"<!-- reproduce .*?<!-- end -->|^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
"""Generated tables and code."""
MEASURED = re.compile(
    r"(?<![\d.])([2-9]\d\.\d+\b|\d+\.\d+ (%|points?\b|more\b|less\b|above\b|below\b|higher\b|lower\b|ahead\b|apart\b))"
)
"""An accuracy in %, or a difference of two."""
SETTINGS = ("0.65 points",)
"""Settings that `MEASURED` would match."""


@pytest.mark.parametrize("name", PAGES)
def test_reproduce_into_leaves_committed_pages_unchanged(name: str) -> None:
    text = (ROOT / name).read_text()
    assert filled_document(ROOT / name, text, "full", [ROOT / "results"], {}) == (text, [])


@pytest.mark.parametrize("name", PAGES)
def test_no_measured_number_is_written_by_hand(name: str) -> None:
    text = NUMBER.sub("n", GENERATED.sub("", (ROOT / name).read_text()))
    found = [match[0] for match in MEASURED.finditer(" ".join(text.split()))]
    assert [number for number in found if number not in SETTINGS] == []


def test_every_note_shows_a_figure() -> None:
    for note in (ROOT / "results" / "notes").glob("*.md"):
        (figure, *_) = re.findall(r"!\[[^]]+\]\(([^)]+\.png)\)", note.read_text())
        assert (note.parent / figure).is_file()


def test_note_figures_are_drawn_from_the_notes(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "note_figures.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (ROOT / "results/notes").glob("*.png")}


def test_pages_have_at_most_70_numbers_in_sentences() -> None:
    assert {"README.md", "results/reproduction.md"} < set(PAGES)
    assert sum(len(NUMBER.findall((ROOT / name).read_text())) for name in PAGES) <= 70


@pytest.mark.parametrize("sentence", ["it has 72.4 %", "5.1 points", "it is 0.3 above", "Uniform has 69.02 ± 0.54"])
def test_measured_pattern_finds_handwritten_numbers(sentence: str) -> None:
    assert MEASURED.search(sentence)
    assert not MEASURED.search("α = 0.1 and β = 12.5 with a guidance of 1.5, 33,650 images, 3 to 12 points, 30 %")


def test_records_name_no_path_of_a_machine() -> None:
    records = [path for path in (ROOT / "results").rglob("*") if path.suffix in (".json", ".jsonl")]
    assert len(records) > 100
    assert not [path.name for path in records if re.search(r'[": =]/\w', path.read_text(encoding="utf-8"))]
