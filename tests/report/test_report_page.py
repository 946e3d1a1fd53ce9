"""The HTML report: self-contained, accessible, escaped, and rendered by a real browser without requests."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_runs import write_run
from matplotlib.figure import Figure
from PIL import Image
from waiting import LONG

from fedeas_flwr.report.document import make_document
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.page import Document, Section, Table, as_html, as_markdown, as_svg
from fedeas_flwr.report.run_figures import draw_heat_map
from fedeas_flwr.report.style import legend_above
from fedeas_flwr.report.writing import write_report
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]


QUICKSTART = ROOT / "results" / "quickstart"


class Links(HTMLParser):
    """Collects everything in a page that a browser might fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def check_self_contained(page: str) -> None:
    """Check that no tag, style or picture refers to anything outside the page."""
    links = Links()
    links.feed(page)
    assert not {"script", "iframe", "object"} & set(links.tags)
    assert links.tags.count("img") >= 5
    outside = [link for link in links.found if not link.startswith(("data:", "#"))]
    assert outside == [] and "url(" not in page and "@import" not in page and "http" not in page
    for link in links.found:
        if link.startswith("data:image/svg+xml;base64,"):
            picture = base64.b64decode(link.partition(",")[2]).decode()
            inside = re.findall(r'href="([^"]*)"', picture)
            assert all(target.startswith(("#", "data:")) for target in inside)
            assert "<script" not in picture and not re.search(r"url\((?!#)", picture)


@pytest.fixture(scope="module")
def quickstart_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of the committed quickstart's report; its Markdown is in a subfolder."""
    folder = tmp_path_factory.mktemp("page")
    groups, left_out = group_runs([RunDirectory(QUICKSTART / name) for name in ("none", "fedeas", "uniform")])
    write_report(groups, left_out, folder / "report.html", folder / "markdown")
    return folder / "report.html"


def test_page_is_self_contained(quickstart_page: Path) -> None:
    page = quickstart_page.read_text()
    check_self_contained(page)
    for section in ("Results", "Accuracy", "Accuracy per image", "Classes before and after filling",
                    "Where the images go", "Dissimilarity of client updates", "Time by phase", "Configuration",
                    "Environment"):  # fmt: skip
        assert f">{section}</h2>" in page
    for cell in ("74.5", "92.7", "96.9", "+18.2†", "20", "0.630", "46 ray"):
        assert f"<td>{cell}</td>" in page


class Nesting(HTMLParser):
    """Checks the nesting of tags, and collects ids and labels of pictures and scrollable elements."""

    EMPTY = frozenset({"meta", "link", "img", "br", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        self.open += [] if tag in self.EMPTY else [tag]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY and (not self.open or self.open.pop() != tag):
            self.wrong.append(f"</{tag}> at {self.getpos()}")


def test_page_is_well_formed_and_accessible(quickstart_page: Path) -> None:
    page = Nesting()
    page.feed(quickstart_page.read_text())
    assert page.wrong == [] and page.open == []
    ids = [found["id"] for _, found in page.attributes if "id" in found]
    assert len(ids) == len(set(ids)) > 10
    targets = [str(found["href"])[1:] for tag, found in page.attributes if tag == "a"]
    assert len(targets) >= 9 and set(targets) <= set(ids)
    spoken = [str(found["alt"]) for tag, found in page.attributes if tag == "img"]
    assert any("FedEAS: 92.7 % (893 images)" in words for words in spoken), "the alternative text lacks the legend"
    assert all(len(words) > 20 and "$" not in words for words in spoken) and len(set(spoken)) == len(spoken)
    scrolling = [found for _, found in page.attributes if found.get("class") == "wide"]
    assert len(scrolling) >= 12 and all(found["tabindex"] == "0" and found["aria-label"] for found in scrolling)


def test_table_heads_keep_names_whole_and_markup_is_limited() -> None:
    table = Table(("for CIFAR-10, K = 20", "a|b"), [("**82.4**<br>paper 71.7", "`x` <i> **")])
    document = Document("a", ["one ` backtick"], [Section("s", tables=[table])])
    page = as_html(document)
    assert "<th><span>for</span> <span>CIFAR-10,</span> <span>K = 20</span></th>" in page
    assert '<td><b>82.4</b><br><span class="below">paper 71.7</span></td>' in page
    assert "<td><code>x</code> &lt;i&gt; **</td>" in page and "<p>one ` backtick</p>" in page
    text = as_markdown(document)
    assert "| for CIFAR-10, K = 20 | a\\|b |\n| :-- | --: |\n| **82.4**<br>paper 71.7 | `x` &lt;i> ** |" in text


def test_markdown_report_has_its_pictures_in_its_folder(quickstart_page: Path) -> None:
    folder = quickstart_page.parent / "markdown"
    text = (folder / "report.md").read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(pictures) >= 6
    for name in pictures:
        with Image.open(folder / name) as picture:
            assert picture.width >= 1500  # sharp enough for a slide
        assert (folder / name).with_suffix(".svg").is_file()
    assert "| FedEAS | 1 | 92.7 | 96.9 | 98.3 | 893 | +18.2† | 20 | 3 | 0.630 | 46 ray |" in text


def test_page_is_reproducible(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.1, 0.2])
    assert as_html(make_document(group_runs([run])[0])) == as_html(make_document(group_runs([run])[0]))


def test_run_names_are_escaped_in_the_page(tmp_path: Path) -> None:
    bad = 'x"><script>alert(1)</script>'
    runs = [write_run(tmp_path / name, [0.5], weights=name) for name in ("a.safetensors", f"{bad[:12]}.safetensors")]
    page = as_html(make_document(group_runs(runs)[0]))
    links = Links()
    links.feed(page)
    assert "script" not in links.tags and "&lt;script" in page


PROBE = """<script>
addEventListener("load", () => {
  const images = [...document.images];
  const asked = performance.getEntriesByType("resource").map((r) => r.name).filter((n) => !n.startsWith("data:"));
  const drawn = images.filter((i) => i.naturalWidth > 100 && i.clientHeight > 100).length;
  const facts = {images: images.length, drawn: drawn, asked: asked,
    wide: document.documentElement.scrollWidth <= innerWidth, height: document.body.clientHeight};
  document.body.setAttribute("data-facts", JSON.stringify(facts));
  console.error("the probe's own line");
});
</script></body>"""


def browser() -> str:
    """Return the path of a Chromium browser, or skip the test if there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium on this machine")
    return found


def test_browser_renders_the_page_without_errors(quickstart_page: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    probed.write_text(quickstart_page.read_text().replace("</body>", PROBE))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,5000",
               f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]  # fmt: skip
    done = subprocess.run(
        [browser(), *options, f"--screenshot={tmp_path / 'page.png'}", "--dump-dom", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    complaints = re.findall(r'CONSOLE.*?"(.*)", source', done.stderr)
    assert complaints == ["the probe's own line"], done.stderr[-2000:]
    found = re.search(r"data-facts=\"([^\"]*)\"", done.stdout)
    assert found, done.stderr[-2000:]
    facts = json.loads(found[1].replace("&quot;", '"'))
    assert facts["images"] == facts["drawn"] >= 6
    assert facts["asked"] == [] and facts["wide"] and facts["height"] > 3000
    with Image.open(tmp_path / "page.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    red = (np.abs(pixels.astype(int) - (0xD1, 0x49, 0x5B)).max(axis=2) < 12).any(axis=1)
    assert red[:40].any() and red[600:1300].sum() > 20  # the bar at the top and FedEAS's curve


HOSTILE = "a</td><script>x</script>\n# forged\x1b[2J [x](javascript:y) <!-- -- $\\frac$ " + "z" * 5000


def test_a_hostile_name_is_escaped_in_html_and_markdown() -> None:
    document = Document(HOSTILE, [HOSTILE], [Section("s", [HOSTILE], [Table((HOSTILE,), [(HOSTILE,)])])])
    for page in (as_html(document), as_markdown(document)):
        assert "<script" not in page and "<!-- --" not in page and "\x1b" not in page and "\n# forged" not in page
    text = as_markdown(document)
    assert "](javascript" not in text and len(text.splitlines()) == 11
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) < 700


def test_a_hostile_value_in_a_groups_name_is_one_line(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(n), [0.5], policy="fedeas", generator=name)
        for n, name in enumerate(("a", "b\n\x1b[2J"))
    ]
    assert [group.name for group in group_runs(runs)[0]] == ["generator = a", "generator = b �[2J"]


def test_a_hostile_name_in_a_figure_is_well_formed_svg() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    draw_heat_map(left, np.ones((2, 2), np.int64), [HOSTILE, "$\\frac$\x1b"], "$\\frac$ <b> --", "Reds")
    right.plot([1], [1], label=HOSTILE)
    legend_above(right)
    picture = as_svg(figure)
    ElementTree.fromstring(picture)
    assert b"<script" not in picture
