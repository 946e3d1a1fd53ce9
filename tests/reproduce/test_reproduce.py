"""Tables from run directories: means and budgets by hand, the page, and the committed figures."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from records import found_in, record, smoke_cells

from fedeas_flwr.partition import LEAKAGE
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.report.document import make_document
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.page import Document, as_html, as_markdown
from fedeas_flwr.reproduce import drops, extra_tables, paper, paper_comparison, tables
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, DEFAULT_COLUMN
from fedeas_flwr.reproduce.claims import verdict
from fedeas_flwr.reproduce.items import ITEMS, choose
from fedeas_flwr.reproduce.results import Results
from fedeas_flwr.reproduce.sections import Section, make_sections
from fedeas_flwr.reproduce.summary import make_page, missing_runs_command
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]
TWENTY = [0.1] * 180 + [0.5, 0.6] * 10
"""Rounds 181 to 200 have a mean of 0.55; the first peak is in round 182."""


# ------------------------------------------------------------------------------------------------- means by hand


def test_last_20_mean_sd_and_difference_by_hand(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{DEFAULT_COLUMN}/fedavg", 1, TWENTY)
    record(tmp_path / "b", f"{DEFAULT_COLUMN}/fedavg", 2, [0.9] + [0.1] * 179 + [0.51] * 20)
    record(tmp_path / "c", f"{DEFAULT_COLUMN}/fedavg", 3, [0.1] * 180 + [0.50] * 20)
    results = found_in(tmp_path)
    value = paper_comparison.last_20_of(results, f"{DEFAULT_COLUMN}/fedavg")
    assert value.seeds == (1, 2, 3)
    assert value.mean == pytest.approx(52.0)  # of 55, 51, 50
    assert value.sd == pytest.approx(7**0.5)  # (9 + 1 + 4) / 2
    assert value.difference == pytest.approx(52.0 - 50.18)
    assert paper_comparison.format_cell(value) == "52.00 ± 2.65<br>3 seeds; paper 50.18, +1.82"
    peak = paper_comparison.peak_of(results, f"{DEFAULT_COLUMN}/fedavg")
    assert peak.mean == pytest.approx((60 + 90 + 50) / 3)
    row = next(row for row in tables.column_table(results, DEFAULT_COLUMN).rows if row[0] == "FedAvg")
    ours, images = ["52.00 ± 2.65", "1, 2, 3", "50.18", "+1.82", "66.67 ± 20.82", "56.08", "+10.59"], "0"
    assert row == ["FedAvg", *ours, images, "5.0"]


def test_runs_that_stopped_early_do_not_count(tmp_path: Path) -> None:
    record(tmp_path / "short", f"{DEFAULT_COLUMN}/fedavg", 1, TWENTY[:100])
    assert found_in(tmp_path).of(f"{DEFAULT_COLUMN}/fedavg") == []


def test_runs_with_another_form_of_gamma_hat_are_no_repetitions(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{DEFAULT_COLUMN}/fedavg", 1, TWENTY)
    record(tmp_path / "b", f"{DEFAULT_COLUMN}/fedavg", 1, [0.5] * 200, keys={"gamma-hat": "all-state"})
    results = found_in(tmp_path)
    runs = {form: results.of(f"{DEFAULT_COLUMN}/fedavg", form) for form in ("", "trainable", "all-state")}
    names = {form: [run.path.name for run in found] for form, found in runs.items()}
    assert names == {"": ["a"], "trainable": ["a"], "all-state": ["b"]} and results.repeated == []


def test_planned_images_are_those_of_clients_that_took_part(tmp_path: Path) -> None:
    name = f"{BETA_SWEEP_COLUMN}/fedeas"
    rounds = record(tmp_path / "a", name, scale="smoke") / "rounds.jsonl"
    records = [json.loads(line) | {"clients": [0, 2]} for line in rounds.read_text().splitlines()]
    rounds.write_text("".join(json.dumps(one) + "\n" for one in records))
    (run,) = found_in(tmp_path, "smoke").of(name)
    plan = planned_allocation(run.config, planned_counts(run.config)).sum(axis=1)
    assert run.planned_images() == plan[0] + plan[2] < plan.sum()


def test_one_seed_has_no_sd_and_missing_cells_are_dashes(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{DEFAULT_COLUMN}/moon", 4, TWENTY)
    record(tmp_path / "b", f"{DEFAULT_COLUMN}/fedprox", 4, TWENTY, seconds=2.0)
    results = found_in(tmp_path)
    table = tables.large_table(results, paper.COLUMNS, paper_comparison.last_20_of)
    rows = {row[0]: row[1:] for row in table.rows}
    main = paper.COLUMNS.index(DEFAULT_COLUMN)
    assert rows["MOON"][main] == "55.00<br>paper 43.08, +11.92"
    assert rows["MOON"][0] == "–<br>paper 37.08"
    assert rows["Full-Balance"][0] == "–"
    assert rows["FedEAS total gen."][main] == "–<br>paper 33,650"
    assert (rows["Minutes per run"][main], rows["Minutes per run"][0]) == ("5.0 to 8.3", "–")
    assert [len(row) for row in table.rows] == [9] * 13


def test_beta_table_gain_and_efficiency_by_hand(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{BETA_SWEEP_COLUMN}/fedavg", 1, [0.5] * 200)
    record(tmp_path / "b", f"{BETA_SWEEP_COLUMN}/fedeas-b4", 1, [0.6] * 200, seconds=2.0)
    rows = {row[0]: row[1:] for row in tables.beta_table(found_in(tmp_path)).rows}
    last, images, gain, eta, minutes = rows["FedEAS β = 4"]
    assert last == "60.00<br>paper 66.11, −6.11"
    assert images == "4,113 ✓"
    assert gain == "10.00<br>paper 10.59, −0.59"
    assert eta == "2.431<br>paper 2.575, −0.144"  # 10 · 1000 / 4113
    assert rows["FedAvg"][1:] == ["0", "–", "–", "5.0"]
    assert minutes == "8.3"  # 200 · (2 + 0.5) / 60
    assert rows["Uniform β = 20"][0] == "–<br>paper 66.46"


def test_gamma_table_compares_equal_forms_of_gamma_hat(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{BETA_SWEEP_COLUMN}/fedavg", 1, gamma_hat=2e-4)
    record(tmp_path / "b", f"{BETA_SWEEP_COLUMN}/fedeas", 1, gamma_hat=5e-5)
    record(tmp_path / "c", f"{BETA_SWEEP_COLUMN}/fedeas", 2, gamma_hat=0.8, keys={"gamma-hat": "trainable"})
    rows = tables.gamma_table(found_in(tmp_path)).rows
    assert rows[2][1] == "0.0002<br>paper 0.000142"
    assert rows[2][3] == "5e-05<br>paper 1.95e-05"
    assert rows[3][3] == "75.0<br>paper 86.3, −11.3"
    assert rows[4][1:] == ["–", "–", "0.8", "–"]
    (tmp_path / "c" / "summary.json").unlink()
    assert len(tables.gamma_table(found_in(tmp_path)).rows) == 4


def test_text_table_by_hand(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{BETA_SWEEP_COLUMN}/fedeas", 1, [0.1] * 29 + [0.7] * 171)
    record(tmp_path / "b", f"{BETA_SWEEP_COLUMN}/uniform", 1, [0.64] * 200)
    record(tmp_path / "c", "c10-k20-a0.3/fedeas+scaffold", 1, [0.1, 0.8] * 100)
    record(tmp_path / "d", f"{BETA_SWEEP_COLUMN}/full-balance", 1, seconds=2.5)
    rows = {row[0]: row[2:] for row in extra_tables.text_table(found_in(tmp_path)).rows if row[1].endswith("α = 0.1")}
    assert rows["FedEAS's lead over Uniform, peak, ddpm"] == ["6.00", "1", "6.34", "−0.34"]
    assert rows["FedEAS: time, generation included"] == ["5 min", "1", "3.1 h", "–"]  # 200 · 1.5 s
    assert rows["Full-Balance's time over FedEAS's"] == ["2.00", "1", "3.72", "−1.72"]
    assert rows["Uniform: images that make their client's labels less even"] == [
        "1679",
        "–",
        "1679",
        "+0",
    ]  # from the plan, not from a run
    values = {(v.cell, v.measure): v for v in extra_tables.text_table(found_in(tmp_path)).values}
    assert values[f"{BETA_SWEEP_COLUMN}/fedeas", "rounds to 70 %"].ours == (30,)
    assert values["c10-k20-a0.3/fedeas+scaffold", "peak %"].difference == pytest.approx(80 - 78.18)


def test_shared_table_compares_with_own_images_and_the_paper(tmp_path: Path) -> None:
    record(tmp_path / "own", f"{DEFAULT_COLUMN}/uniform", 1, [0.69] * 200)
    record(tmp_path / "shared", f"{DEFAULT_COLUMN}/uniform-shared", 1, [0.585] * 200, images=33_650)
    table, place = extra_tables.shared_table(found_in(tmp_path)), "CIFAR-10, K = 100, α = 0.1"
    assert table.rows[:4] == [
        [place, "Uniform", "58.81", "of each client's own", "69.00", "1", "+10.19", "33,650"],
        [place, "Uniform", "", "the same of a class on all clients", "58.50", "1", "−0.31", "340"],
        [place, "Uniform", "", "one seed for all clients", "–", "–", "–", "385"],
        [place, "Missing-only", "70.18", "of each client's own", "–", "–", "–", "33,650"],
    ]
    assert [(budget.wanted, budget.by, budget.met) for budget in table.budgets] == [
        (33_650, "paper", True),
        (33_650, "plan", True),
    ]
    assert [(row[0], row[1], row[-1]) for row in (*table.rows[-8:-6], *table.rows[-2:])] == [
        ("CIFAR-10, K = 20, α = 0.1", "Uniform", "13,437"),
        ("CIFAR-10, K = 20, α = 0.1", "Uniform", "725"),
        ("CIFAR-100, K = 100, α = 0.1", "Uniform", "74,005"),
        ("CIFAR-100, K = 100, α = 0.1", "Uniform", "1,922"),
    ]


def test_drawn_table_compares_sampler_variants(tmp_path: Path) -> None:
    place, title = "c100-k100-a0.1", "CIFAR-100, K = 100, α = 0.1"
    record(tmp_path / "guided", f"{place}/fedeas-guided", 1, [0.51] * 200, images=74_005)
    table = extra_tables.drawn_table(found_in(tmp_path))
    assert table.rows[-4:] == [
        [title, "FedEAS", "52.04", "20 steps uniform in time, no guidance", "–", "–", "–"],
        [title, "FedEAS", "", "steps uniform in log SNR", "–", "–", "–"],
        [title, "FedEAS", "", "guidance 1.5", "51.00", "1", "−1.04"],
        [title, "FedEAS", "", "guidance 1.5, steps uniform in log SNR", "–", "–", "–"],
    ]
    assert [(budget.wanted, budget.by, budget.met) for budget in table.budgets] == [(74_005, "plan", True)]
    for item in ("shared", "drawn", "batches"):
        make = ITEMS[item].table
        assert make is not None
        few, all_of_them = (make(found_in(tmp_path), columns).rows for columns in ([DEFAULT_COLUMN], paper.COLUMNS))
        assert 0 < len(few) < len(all_of_them) and few == [row for row in all_of_them if row in few]


def test_accuracy_drops_by_hand(tmp_path: Path) -> None:
    """Accuracy drops in rounds 5 (too early to count) and 150; 4 points less in round 101 is no drop."""
    curve = [0.7] * 200
    curve[4], curve[100], curve[149], curve[150] = 0.2, 0.66, 0.217, 0.63
    record(tmp_path / "two", f"{DEFAULT_COLUMN}/fedeas", 1, curve)
    record(tmp_path / "none", f"{DEFAULT_COLUMN}/fedeas", 2, [0.7] * 200)
    record(tmp_path / "min8", f"{DEFAULT_COLUMN}/fedeas-min8", 2, [0.72] * 200, images=33_650)
    rows = [row for row in extra_tables.batches_table(found_in(tmp_path)).rows if row[2] == "FedEAS"]
    assert rows[0][3:6] == ["from 2 images", "70.00 ± 0.00", "1, 2"] and rows[0][7:] == ["2, 0", "48.3"]
    assert rows[1][3:] == ["from 8 images", "72.00", "2", "72.00", "0", "–"]


def test_batches_table_compares_minimum_batch_sizes(tmp_path: Path) -> None:
    record(tmp_path / "all", f"{BETA_SWEEP_COLUMN}/scaffold", 1, TWENTY)
    record(tmp_path / "min8", f"{BETA_SWEEP_COLUMN}/scaffold-min8", 1, [0.6] * 200)
    rows = extra_tables.batches_table(found_in(tmp_path)).rows
    assert ["20", "0.1", "Uniform, β = 4", "from 8 images"] in [row[:4] for row in rows]
    all_batches, large = (row for row in rows if row[:3] == ["20", "0.1", "SCAFFOLD"])
    assert [row[:4] for row in (all_batches, large)] == [
        ["20", "0.1", "SCAFFOLD", "from 2 images"],
        ["20", "0.1", "SCAFFOLD", "from 8 images"],
    ]
    assert large[4] == "60.00" != all_batches[4]
    assert choose(["batches"], [DEFAULT_COLUMN], "full").needed()[-1].name == f"{DEFAULT_COLUMN}/fedeas-min8"


def test_best_and_second_best_are_marked_in_complete_columns(tmp_path: Path) -> None:
    for place, method in enumerate(paper.LAST_20):
        if method != "fedeas":
            record(tmp_path / method, f"{DEFAULT_COLUMN}/{method}", 1, [0.3 + place / 100] * 200)
    incomplete = tables.large_table(found_in(tmp_path), paper.COLUMNS, paper_comparison.last_20_of)
    assert not any("**" in cell for row in incomplete.rows for cell in row)
    record(tmp_path / "last", f"{DEFAULT_COLUMN}/fedeas", 1, [0.2] * 200)
    table = tables.large_table(found_in(tmp_path), paper.COLUMNS, paper_comparison.last_20_of)
    marked = {row[0]: row[1 + paper.COLUMNS.index(DEFAULT_COLUMN)] for row in table.rows}
    assert marked["Missing-only"].startswith("**37.00**")
    assert marked["Uniform"].startswith("<ins>36.00</ins>")
    assert marked["Full-Balance"].startswith("38.00<br>")


def test_pages_of_the_paper_protocol_state_test_set_leakage(tmp_path: Path) -> None:
    run = RunDirectory(record(tmp_path / "a", f"{DEFAULT_COLUMN}/fedavg"))
    assert LEAKAGE in make_page(found_in(tmp_path), []).text
    assert LEAKAGE in make_document(group_runs([run])[0]).text
    clean = RunDirectory(record(tmp_path / "b", f"{DEFAULT_COLUMN}/fedavg-clean"))
    assert LEAKAGE not in make_document(group_runs([clean])[0]).text


# --------------------------------------------------------------------------------------------------------- budgets


def test_page_lists_cells_with_a_wrong_number_of_images(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{DEFAULT_COLUMN}/uniform", 1, images=33_649)
    record(tmp_path / "b", f"{DEFAULT_COLUMN}/fedeas", 1)
    results = found_in(tmp_path)
    wrong, right = (
        paper_comparison.budget_of(results, f"{DEFAULT_COLUMN}/{method}") for method in ("uniform", "fedeas")
    )
    assert wrong and right and right.met and not wrong.met
    assert paper_comparison.show_budget(wrong) == "33,649 ✗ (paper: 33,650)"
    table = tables.large_table(results, paper.COLUMNS, paper_comparison.last_20_of)
    page = make_page(results, [Section(name="table1", title="", tables=[table])])
    assert "Matched budgets: 1 of 2 cells generated the expected number of images." in page.text
    assert f"{DEFAULT_COLUMN}/uniform generated 33649 images, not the paper's 33,650." in page.text


def test_budget_at_smoke_scale_comes_from_the_plan(tmp_path: Path) -> None:
    for method in ("fedeas", "uniform", "missing-only", "full-balance"):
        record(tmp_path / method, f"{DEFAULT_COLUMN}/{method}", 1, scale="smoke", images=434)
    budgets = [
        paper_comparison.budget_of(found_in(tmp_path, "smoke"), f"{DEFAULT_COLUMN}/{method}")
        for method in ("fedeas", "uniform", "missing-only", "full-balance")
    ]
    assert [budget.met for budget in budgets if budget] == [True, True, True, False]
    value = paper_comparison.last_20_of(found_in(tmp_path, "smoke"), f"{DEFAULT_COLUMN}/fedeas")
    assert value.paper == 72.55 and value.difference is None  # digits are not CIFAR


# ------------------------------------------------------------------------------------------------- the whole page


ReproducedPage = tuple[Document, list[Section], Path, Results]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> ReproducedPage:
    """Return the page of all items except samples at smoke scale, from fake records; one cell is missing."""
    folder = tmp_path_factory.mktemp("page")
    for number, one in enumerate(smoke_cells()):
        if one.name != f"{BETA_SWEEP_COLUMN}/uniform-b20":
            for seed in one.seeds("smoke"):
                accuracies = [min(0.97, 0.3 + 0.08 * i + number / 1000) for i in range(10)]
                record(folder / "runs" / f"{number}-{seed}", one.name, seed, accuracies, "smoke", gamma_hat=0.5)
    choice = choose([name for name in ITEMS if name != "samples"], [], "smoke")
    results = choice.find([folder / "runs"])
    fill = partial(missing_runs_command, "smoke", {"--out": ["o{u}t"], "--set": []})
    sections = make_sections(choice, results, folder, fill)
    return make_page(results, sections), sections, folder, results


def test_page_has_every_table_and_figure(page: ReproducedPage) -> None:
    _, made, folder, results = page
    assert [section.name for section in made] == [name for name in ITEMS if name != "samples"]
    pictures = {path.stem for path in folder.glob("*.png")}
    assert pictures == {"fig1", "fig2", "fig3", "fig4", "fig5", "closed-form"}
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert sum(bool(runs) for runs in results.cells.values()) == len(results.cells) - 1
    tables_made = [table for section in made for table in section.tables]
    assert all(len(row) == len(table.head) for table in tables_made for row in table.rows)


def test_command_for_missing_runs_asks_for_what_is_not_given() -> None:
    def command(*given: str, cells: tuple[str, ...] = ("c10-k20-a0.1/fedeas",)) -> tuple[list[str], str]:
        words, note = missing_runs_command("full", {"--set": given}, ["fig1"], cells)
        return [word for word in words.split() if "=" in word], note

    both = ("c10-k20-a0.1/fedeas", "c100-k20-a0.1/fedeas")
    assert command() == (["data-dir=DIR", "generator=DIR", "backend=inline"], "")
    assert command("backend=ray", "generator=g")[0] == ["backend=ray", "generator=g", "data-dir=DIR"]
    words, note = command(cells=both)
    assert words == ["data-dir=DIR", "backend=inline"] and note.startswith("The runs use the generators in ")
    assert command("generator=g", cells=both)[1] == ""
    assert command(cells=("c10-k20-a0.1/fedavg",))[0] == ["data-dir=DIR", "backend=inline"]


def test_page_names_missing_runs_and_the_command_for_them(
    page: ReproducedPage,
) -> None:
    text = as_markdown(page[0])
    assert (
        text.count(f"Missing, 1 run: {BETA_SWEEP_COLUMN}/uniform-b20 seed 1.") == 4
    )  # Fig. 5, the β table, both counts of drops
    assert "To do them: `fedeas reproduce beta --scale smoke --run --out 'o{u}t'`" in text
    assert "| Uniform β = 6.667 | –<br>paper 66.46 |" in text


def test_html_page_is_self_contained(page: ReproducedPage) -> None:
    document = as_html(page[0])
    assert document.count('src="data:image/svg+xml;base64,') == 6
    assert not re.findall(r'(?:src|href)="(?!data:|#)', document) and "http" not in document
    assert document.count("<table>") == sum(len(section.tables) for section in page[1])
    assert "<b>" in document and "**" not in document
    links = re.findall(r'href="#([^"]*)"', document)
    assert "table-1-accuracy-last-20-round-mean" in links and all(f'id="{link}"' in document for link in links)


def test_html_page_escapes_markup() -> None:
    hostile = Document("a <b> title", ["Unreadable: /runs/<script>alert(1)</script>"], [])
    document = as_html(hostile)
    assert "<script>" not in document and "a &lt;b&gt; title" in document


# ---------------------------------------------------------------------------------------------- committed files


def test_committed_figures_include_all_committed_runs() -> None:
    """A figure drawn before a run was added would lack it."""
    drawn = json.loads((ROOT / "results" / "figures" / "results.json").read_text())
    names = [part["name"] for part in drawn["items"]]
    assert names == ["fig1", "fig4", "fig5"] and not any(part["missing"] for part in drawn["items"])
    assert all((ROOT / "results" / "figures" / part["picture"]).is_file() for part in drawn["items"])
    found = choose(names, [], "full").find([ROOT / "results"])
    today = {name: [str(run.path.relative_to(ROOT)) for run in runs] for name, runs in found.cells.items()}
    assert drawn["runs"] == today


@pytest.mark.parametrize(
    ("published", "ours", "says"),
    [
        (5.0, 4.0, "agrees"),
        (5.0, 2.5, "same sign, smaller"),
        (5.0, 7.5, "same sign, larger"),
        (5.0, -4.0, "opposite"),
        (5.0, 1.9, "not decided"),
        (5.0, None, "to be run"),
        (None, 4.0, "–"),
    ],
)
def test_verdict_on_a_claim(published: float | None, ours: float | None, says: str) -> None:
    assert verdict(published, ours, error=1.0) == says


def test_drops_are_counted_by_last_batch(tmp_path: Path) -> None:
    """Client 14 has a last batch of two images, and every client takes part in every round."""
    accuracies = [0.5] * 200
    accuracies[49] = 0.3
    record(tmp_path / "run", f"{BETA_SWEEP_COLUMN}/fedeas-b8", accuracies=accuracies)
    other = record(tmp_path / "other", f"{BETA_SWEEP_COLUMN}/fedeas-b4", accuracies=accuracies) / "rounds.jsonl"
    lines = other.read_text().splitlines()
    lines[99] = json.dumps({**json.loads(lines[99]), "clients": []})  # a failed round
    other.write_text("\n".join(lines) + "\n")
    rows = drops.last_batch_table(found_in(tmp_path), [BETA_SWEEP_COLUMN]).rows
    assert rows[0] == ["no such client", "1 of 189 (0.5 %)"] and rows[4] == ["over 12 %", "1 of 190 (0.5 %)"]
    rows = drops.imbalance_table(found_in(tmp_path), [BETA_SWEEP_COLUMN]).rows
    assert rows[-1] == ["0.90 to 1.00", "–", "–", "1 of 189 (0.5 %)"]
