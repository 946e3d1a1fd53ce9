"""Every command of the guides works as it is written.

Blocks marked ``sh`` are run, in order, in a folder with `conf` and `results` as a clone has them; ``python`` blocks
too, and ``toml`` blocks are written to the file that the text before them names. Blocks marked ``gpu`` need hardware,
data and hours: their command lines are parsed (commands, options, types), their run-config keys are validated.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_packaging import check_words

from fedeas_flwr.config_files import read_config

pytestmark = pytest.mark.flower

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^ *```(sh|python|toml|gpu)\n(.*?)^ *```", re.S | re.M)


def blocks(name: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "docs" / name).read_text())


def make_photos(folder: Path) -> None:
    """Write the reader's data: photographs of three kinds, of different sizes."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("daisy", "rose", "tulip")):
        (folder / name).mkdir(parents=True)
        for number in range(40):
            size = (20, 24) if number % 2 else (24, 20)
            pixels = rng.integers(0, 90, (*size, 3), dtype=np.uint8)
            pixels[..., label] += 120
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def follow(name: str, folder: Path) -> None:
    """Write the files and run the commands of a guide, as a reader would."""
    for link in ("conf", "results"):
        (folder / link).symlink_to(ROOT / link)
    found = blocks(name)
    for kind, text in found:  # files first: the text shows them after the command that needs them
        if kind == "toml":
            (folder / "mine.toml").write_text(text)
    shell = f'set -e\nfedeas() {{ "{sys.executable}" -m fedeas_flwr "$@"; }}\n'
    for kind, text in found:
        if kind == "gpu" or kind == "toml":
            continue
        command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-c", shell + text]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FEDEAS_OFFLINE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.slow
def test_guide_reading_a_report(tmp_path: Path) -> None:
    follow("reading-a-report.md", tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 100_000 and (tmp_path / "report" / "accuracy.png").is_file()


@pytest.mark.slow
def test_guide_first_run(digits_generator: Path, tmp_path: Path) -> None:
    follow("first-run.md", tmp_path)
    for policy in ("none", "fedeas"):
        assert (tmp_path / "runs" / "first" / policy / "rounds.jsonl").read_text().count("\n") == 6
    assert "± " in (tmp_path / "runs" / "seeds" / "report.html").read_text()


@pytest.mark.slow
def test_guide_your_own_data_and_generator(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos")
    follow("your-own-data-and-generator.md", tmp_path)
    page = (tmp_path / "runs" / "mine" / "report.html").read_text()
    assert "FedEAS report: photos" in page and "Generated images" in page
    assert re.search("<td>(daisy|rose|tulip)</td>", page)  # the name of the worst class


def test_gpu_guide_uses_existing_commands_options_and_keys() -> None:
    lines = [line.strip() for kind, text in blocks("cifar-on-a-gpu.md") if kind == "gpu" for line in text.splitlines()]
    assert len(lines) >= 12
    for line in lines:
        first, *words = shlex.split(line)
        assert first == "fedeas"
        check_words(words)
        if words[0] in ("run", "doctor", "sweep"):
            given = [word for word in words[2:] if re.fullmatch(r"[a-z-]+=[^,]*", word)]
            config = read_config(ROOT / words[1], given)
            assert words[1].startswith(f"conf/{config.dataset}-") and config.generates


@pytest.mark.parametrize("name", ["first-run.md", "reading-a-report.md", "your-own-data-and-generator.md"])
def test_guides_have_no_commands_outside_tested_blocks(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    outside = BLOCK.sub("", text)
    assert not re.findall(r"^ *fedeas ", outside, re.M)
    for kind, block in blocks(name):
        for line in block.splitlines() if kind == "sh" else ():
            if line.startswith("fedeas "):
                check_words(shlex.split(line)[1:])


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "results").rglob("*.md")]
    missing = []
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
            found = page.parent / target if target else page
            if not found.exists() or (anchor and anchor not in anchors(found)):
                missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert missing == []
