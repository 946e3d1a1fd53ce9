"""`fedeas reproduce --into`: it fills tables between two marker lines and changes nothing else."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import runners
from records import record

from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN

into = partial(runners.run_in_process, "reproduce", "--into", "doc.md", "--runs", "records")
DOCUMENT = f"before\n<!-- reproduce {BETA_SWEEP_COLUMN}/fedavg -->\nold\n<!-- end -->\nafter\n"
FILLED = "| Cell | Ours, last-20 % | Seeds |"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with one record."""
    record(tmp_path / "records" / "fedavg", f"{BETA_SWEEP_COLUMN}/fedavg", 1, [0.5] * 10, "smoke")
    return tmp_path


def test_into_fills_tables_and_keeps_the_text_around_them(place: Path) -> None:
    words = f"<!-- reproduce ablation -->\n<!-- end --> between\n{DOCUMENT}"
    (place / "doc.md").write_text(words)
    done = into(cwd=place)
    assert done.returncode == 0, done.stderr
    text = (place / "doc.md").read_text()
    assert "<!-- reproduce ablation -->\n\n| Variant |" in text and "<!-- end --> between\nbefore\n" in text
    assert FILLED in text and f"| {BETA_SWEEP_COLUMN}/fedavg | 50.00 | 1 | 55.52 |" in text
    assert "old" not in text and text.endswith("\n\n<!-- end -->\nafter\n")
    into(cwd=place)
    assert (place / "doc.md").read_text() == text


def test_into_names_unreadable_records_once_and_uses_others(place: Path) -> None:
    damaged = record(place / "records" / "damaged", f"{BETA_SWEEP_COLUMN}/fedavg", 2, [0.5] * 10, "smoke")
    (damaged / "config.json").write_text('{"config": {"see')
    (place / "doc.md").write_text(DOCUMENT + DOCUMENT)
    done = into(cwd=place)
    assert (done.returncode, done.stdout) == (0, "doc.md\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("Unreadable: records/damaged: records/damaged/config.json is not JSON")
    assert (place / "doc.md").read_text().count(f"| {BETA_SWEEP_COLUMN}/fedavg | 50.00 | 1 | 55.52 |") == 2


def test_into_computes_numbers_in_sentences(place: Path) -> None:
    for seed, accuracy in ((1, 0.6), (2, 0.7)):
        record(
            place / "records" / f"fedeas-s{seed}",
            f"{BETA_SWEEP_COLUMN}/fedeas",
            seed,
            [accuracy] * 10,
            "smoke",
            images=1234,
        )
    (place / "doc.md").write_text(
        f"{number('last-20', 'fedeas')} {number('sd', 'fedeas')}\n{number('last-20', 'fedeas - fedavg')}, "
        f"{number('paper', 'fedavg - ours')}, "
        "1.5 and 9<!--= rounds-2-3 fedavg -->"
    )
    done = into(cwd=place)
    assert done.returncode == 0, done.stderr
    numbers = re.sub(r"<!--.*?-->", "", (place / "doc.md").read_text())
    assert numbers == "65.0 7.1\n15.0, 5.5, 1.5 and 50.0"


def number(statistic: str, words: str) -> str:
    return f"0.0<!--= {statistic} {BETA_SWEEP_COLUMN}/{words} -->"


def test_into_compares_a_sweep_on_equal_partitions(place: Path) -> None:
    grid = {"partition-seed": [1, 2], "policy": ["none", "fedeas"]}
    accuracies = {(1, "none"): 0.5, (2, "none"): 0.7, (1, "fedeas"): 0.6, (2, "fedeas"): 0.9}
    runs = [
        {"partition-seed": seed, "policy": policy, "last_20": accuracy, "images": 10 * (policy == "fedeas")}
        for (seed, policy), accuracy in accuracies.items()
    ]
    (place / "records" / "two").mkdir()
    (place / "records" / "two" / "sweep.json").write_text(json.dumps({"config": {}, "grid": grid, "runs": runs}))
    (place / "doc.md").write_text("<!-- reproduce sweep two policy=none -->\n<!-- end -->\n")
    done = into(cwd=place)
    assert done.returncode == 0, done.stderr
    rows = (place / "doc.md").read_text().splitlines()[4:6]
    assert rows == [
        "| none | 2 | 0 | 60.0 ± 14.1 | – | – |",
        "| fedeas | 2 | 10 | 75.0 ± 21.2 | +15.0 ± 5.0 | 2 of 2 |",
    ]


def test_into_does_not_compare_settings_whose_partitions_the_base_lacks(place: Path) -> None:
    runs = [
        {"partition-seed": seed, "policy": policy, "beta": beta, "last_20": 0.5, "images": 0}
        for seed, policy, beta in [(1, "none", 1.0), (1, "fedeas", 1.0), (2, "fedeas", 1.0), (1, "fedeas", 2.0)]
    ]
    grid = {"partition-seed": [1, 2], "policy": ["none", "fedeas"], "beta": [1.0, 2.0]}
    (place / "records" / "gaps").mkdir()
    (place / "records" / "gaps" / "sweep.json").write_text(json.dumps({"config": {}, "grid": grid, "runs": runs}))
    (place / "doc.md").write_text("<!-- reproduce sweep gaps policy=none -->\n<!-- end -->\n")
    done = into(cwd=place)
    assert done.returncode == 0, done.stderr
    rows = (place / "doc.md").read_text().splitlines()[4:7]
    assert [row.split("|")[1:4] + row.split("|")[6:8] for row in rows] == [
        [" none ", " 1 ", " 1 ", " – ", " – "],
        [" fedeas ", " 1 ", " 2 ", " – ", " – "],
        [" fedeas ", " 2 ", " 1 ", " – ", " – "],
    ]


def test_into_writes_a_sweep_of_one_partition_without_deviations(place: Path) -> None:
    runs = [{"policy": policy, "last_20": 0.5, "images": 0} for policy in ("none", "fedeas")]
    sweep = {"config": {"partition-seed": 1}, "grid": {"policy": ["none", "fedeas"]}, "runs": runs}
    (place / "records" / "one").mkdir()
    (place / "records" / "one" / "sweep.json").write_text(json.dumps(sweep))
    (place / "doc.md").write_text("<!-- reproduce sweep one policy=none -->\n<!-- end -->\n")
    done = into(cwd=place)
    assert done.returncode == 0, done.stderr
    rows = (place / "doc.md").read_text().splitlines()[4:6]
    assert rows == ["| none | 1 | 0 | 50.0 | – | – |", "| fedeas | 1 | 0 | 50.0 | +0.0 | 0 of 1 |"]


def test_into_compares_records_of_a_changed_strategy(tmp_path: Path) -> None:
    cell, curve = f"{BETA_SWEEP_COLUMN}/scaffold", [0.3] * 60 + [0.2] * 140
    record(tmp_path / "records" / "cell-s1", cell, 1, curve)
    record(tmp_path / "records" / "new" / "long", cell, 1, [0.5] * 200, keys={"local-epochs": 1})
    record(tmp_path / "records" / "new" / "short", cell, 1, [0.5] * 40 + [0.4] * 20, keys={"rounds": 60})
    (tmp_path / "doc.md").write_text("<!-- reproduce records new -->\n<!-- end -->\n")
    done = into("--scale", "full", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "doc.md").read_text().splitlines()[4:6]
    assert rows == [
        "| `long` | CIFAR-10, K = 20, α = 0.1 | 181 to 200 | 50.00 | 20.00 | 1 | 60.16 | −10.16 |",
        "| `short` | CIFAR-10, K = 20, α = 0.1 | 41 to 60 | 40.00 | 30.00 | 1 | – | – |",
    ]


def test_into_compares_policies_of_records_seed_by_seed(tmp_path: Path) -> None:
    for method, accuracies in (("fedavg", (0.5, 0.7)), ("fedeas", (0.6, 0.9)), ("uniform", (0.4,))):
        for seed, accuracy in enumerate(accuracies, start=1):
            name, images = f"{BETA_SWEEP_COLUMN}/{method}", 0 if method == "fedavg" else 10 * seed
            record(tmp_path / "records" / "new" / f"{method}-s{seed}", name, seed, [accuracy] * 200, images=images)
    (tmp_path / "doc.md").write_text("<!-- reproduce policies new -->\n<!-- end -->\n")
    done = into(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "doc.md").read_text().splitlines()[4:7]
    assert rows == [
        "| none | 1, 2 | 0 | 60.00 ± 14.14 | 60.00 ± 14.14 | – | – |",
        "| fedeas | 1, 2 | 15 | 75.00 ± 21.21 | 75.00 ± 21.21 | +15.00 ± 5.00 | 2 of 2 |",
        "| uniform | 1 | 10 | 40.00 | 40.00 | −10.00 | 0 of 1 |",
    ]
    record(tmp_path / "records" / "new" / "again", f"{BETA_SWEEP_COLUMN}/fedeas", 2, [0.5] * 200)
    done = into(cwd=tmp_path)
    assert done.returncode == 2 and "records/new has two records with policy = 'fedeas' and seed = 2" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (number("last-20", "fedavg - fedavg-x"), f"doc.md, line 1: cell '{BETA_SWEEP_COLUMN}/fedavg-x': there is none"),
        (
            number("last-20", "fedavg - paper"),
            f"doc.md, line 1: 'last-20 {BETA_SWEEP_COLUMN}/fedavg - paper' is -5.52: must be",
        ),
        (number("last-20", "uniform"), f"doc.md, line 1: '{BETA_SWEEP_COLUMN}/uniform' has no finished run in records"),
        (number("sd", "fedavg"), "doc.md, line 1: 'sd' of 1 runs"),
        ("1<!--= last-20 nowhere/here -->", "doc.md, line 1: 'nowhere/here': neither a cell nor a folder in records"),
        ("<!-- reproduce sweep nowhere a=b -->\n<!-- end -->", "doc.md, line 1: 'sweep nowhere a=b': must be sweep FO"),
        ("<!-- reproduce sweep . policy=none -->\n<!-- end -->", "doc.md, line 1: records has no sweep.json, which"),
        ("<!-- reproduce records nowhere -->\n<!-- end -->", "doc.md, line 1: 'records nowhere': must be records FOL"),
        ("<!-- reproduce policies nowhere -->\n<!-- end -->", "doc.md, line 1: 'policies nowhere': must be policies F"),
        (
            f"a\n<!-- reproduce beta -->\nprose\n{DOCUMENT}",
            "doc.md, line 2: '<!-- reproduce beta -->' has no '<!-- end",
        ),
        (
            f"{DOCUMENT}<!-- reproduce beta -->",
            "doc.md, line 6: '<!-- reproduce beta -->' has no '<!-- end -->' of its",
        ),
        (
            DOCUMENT + DOCUMENT.replace(f"{BETA_SWEEP_COLUMN}/fedavg", "table1 fig1"),
            "doc.md, line 7: 'fig1' is a figure",
        ),
        (DOCUMENT.replace("/fedavg", ""), f"doc.md, line 2: '{BETA_SWEEP_COLUMN}' is a column: add an item"),
        (DOCUMENT.replace(f" {BETA_SWEEP_COLUMN}/fedavg", ""), "doc.md, line 2: name what to reproduce"),
        (DOCUMENT.replace("/fedavg", "/nothing"), f"doc.md, line 2: cell '{BETA_SWEEP_COLUMN}/nothing': there is none"),
        ("no place at all\n", "doc.md has no lines '<!-- reproduce table1 COLUMN -->' and '<!-- end -->'"),
    ],
)
def test_into_invalid_marker_is_rejected_with_its_line(place: Path, text: str, says: str) -> None:
    (place / "doc.md").write_text(text)
    done = into(cwd=place)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1
    assert (place / "doc.md").read_text() == text


def test_into_keeps_link_permissions_and_line_endings(place: Path) -> None:
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


def test_into_file_that_is_not_utf8_is_rejected(place: Path) -> None:
    (place / "doc.md").write_bytes(b"\xff" + DOCUMENT.encode())
    done = into(cwd=place)
    assert (done.returncode, done.stderr) == (2, "error: into = 'doc.md': must be UTF-8, and byte 0 is not\n")
