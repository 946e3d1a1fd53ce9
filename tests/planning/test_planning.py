"""Plans as data and as a table, and counts read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.planning import counts_file
from fedeas_flwr.planning import plan as plan_module
from fedeas_flwr.planning.counts_file import read_counts
from fedeas_flwr.planning.plan import format_table
from fedeas_flwr.policies.registry import POLICIES, REFERENCES

COUNTS = [[64, 0, 0, 0], [32, 32, 0, 0], [16, 16, 16, 16], [0, 0, 0, 0]]


def plan(counts: Any = COUNTS, **changes: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"policy": "fedeas", "beta": 3.0, "gamma": 0.5, "seed": 42}
    return plan_module.plan(counts, **{"dataset": None, "protocol": None, **request, **changes})


def test_plan_by_hand() -> None:
    # q = (64, 12, 12, 12) / 100 and (32, 32, 6, 6) / 76, p = 1/3 each
    after = ((64**2 + 3 * 12**2) / 100**2 - 1 / 4 + 2 * (32**2 + 6**2) / 76**2 - 1 / 4) / 3
    assert plan() == {
        "dataset": None,
        "protocol": None,
        "policy": "fedeas",
        "beta": 3.0,
        "gamma": 0.5,
        "seed": 42,
        "clients": [
            {"client": 0, "samples": 64, "entropy": 0.0, "budget": 12, "generate": [0, 12, 12, 12]},
            {"client": 1, "samples": 64, "entropy": 0.5, "budget": 6, "generate": [0, 0, 6, 6]},
            {"client": 2, "samples": 64, "entropy": 1.0, "budget": 0, "generate": [0, 0, 0, 0]},
            {"client": 3, "samples": 0, "entropy": 1.0, "budget": 0, "generate": [0, 0, 0, 0]},
        ],
        "total": 48,
        "full_balance_total": 192 + 64,
        "imbalance": {
            "before": pytest.approx((0.75 + 0.25) / 3),
            "after": pytest.approx(after),
            "removed": pytest.approx(1 - 3 * after),
        },
        "synthetic_fraction": 48 / (192 + 48),
    }


@pytest.mark.parametrize(
    ("changes", "beta", "gamma", "title"),
    [
        ({"policy": "uniform"}, 3.0, 0.5, "Policy uniform (beta 3, gamma 0.5) on given counts"),
        ({"policy": "uniform", "total": 5}, None, None, "Policy uniform on given counts"),
        ({"policy": "full-balance"}, None, None, "Policy full-balance on given counts"),
        ({"policy": "linear"}, 3.0, None, "Policy linear (beta 3) on given counts"),
        ({"policy": "oversample"}, 3.0, 0.5, "Policy oversample (beta 3, gamma 0.5) on given counts"),
    ],
)
def test_plan_names_beta_and_gamma_only_where_used(
    changes: dict[str, Any], beta: float | None, gamma: float | None, title: str
) -> None:
    result = plan(**changes)
    assert (result["beta"], result["gamma"]) == (beta, gamma)
    assert format_table(result).splitlines()[0] == title
    other = [plan(**changes, **{key: 1.9})["clients"] for key in ("beta", "gamma")]
    decides = [value is not None for value in (beta, gamma)]
    assert [clients != result["clients"] for clients in other] == decides


def test_plan_of_the_main_setting() -> None:
    counts = make_partition("cifar10", "paper", 20, 0.1, 42).counts(plan_labels("cifar10", "paper"), 10)
    result = plan(counts, dataset="cifar10", protocol="paper", beta=12.0)
    assert result["total"] == 13_437
    assert result["full_balance_total"] == 226_783
    assert round(result["imbalance"]["removed"], 3) == 0.518
    assert round(result["synthetic_fraction"], 3) == 0.230  # of the training data, 45,007 + 13,437
    assert [client["budget"] for client in result["clients"]][:5] == [130, 93, 27, 133, 175]


@pytest.mark.parametrize("policy", [*POLICIES, *REFERENCES])
def test_every_policy_gives_plain_json(policy: str) -> None:
    result = plan(policy=policy)
    assert json.loads(json.dumps(result)) == result
    has_budget = policy in ("fedeas", "without-entropy", "linear", "oversample")
    assert all((client["budget"] is not None) == has_budget for client in result["clients"])
    assert result["total"] == sum(sum(client["generate"]) for client in result["clients"])
    assert policy in format_table(result)


def test_plan_passes_on_total_and_strict_mean() -> None:
    assert plan(policy="uniform", total=7)["total"] == 7
    assert plan([[64, 0, 0, 0]], beta=20.0)["total"] == 3 * 80
    assert plan([[64, 0, 0, 0]], beta=20.0, strict_mean=False)["total"] == 3 * 80 + 16


def test_plan_of_empty_clients() -> None:
    result = plan([[0, 0], [0, 0]])
    assert result["synthetic_fraction"] == 0
    assert result["imbalance"] == {"before": 0, "after": 0, "removed": 0}
    assert "0 samples" in format_table(result)


def test_table_shows_every_client_and_class() -> None:
    lines = format_table(plan(dataset="digits", protocol="clean")).splitlines()
    assert lines[0] == "Policy fedeas (beta 3, gamma 0.5) on digits, protocol clean, partition-seed 42"
    assert lines[2].split() == ["client", "samples", "entropy", "budget", "generate", "c0", "c1", "c2", "c3"]
    assert lines[4].split() == ["0", "64", "0.000", "12", "36", ".", "12", "12", "12"]
    assert len({len(line) for line in lines[2:8]}) == 1
    assert "48 samples" in lines[9]
    assert "given counts" in format_table(plan())


def test_table_uses_class_names() -> None:
    names = ["cat", "dog", "2", "a dachshund in a basket"]
    head = format_table(plan(), names).splitlines()[2]
    assert head.split("  ")[-4:] == ["cat", "dog", "c2", "a dachshund in …"]  # a bare number would look like a count
    (*_, forged) = format_table(plan(), ["cat", "dog", "2", "b\nTo generate: 0\x1b[2J"]).splitlines()[2].split("  ")
    assert forged == "b To generate: …"


def test_table_compares_the_plan_with_full_balance() -> None:
    counts = [[30, 10], [0, 5]]  # full balance: 20 + 5
    result = plan(counts, policy="uniform", total=4)
    assert "Full balance: 25 samples; the plan is 16.0% of it" in format_table(result).splitlines()
    assert "Full balance: 0 samples" in format_table(plan([[5, 5]])).splitlines()


def test_table_of_many_classes_stays_narrow() -> None:
    counts = np.zeros((3, 300), dtype=int)
    counts[0, :10] = 500
    counts[1, 0] = 900
    counts[1, 1] = 2
    table = format_table(plan(counts, beta=5.0))
    assert max(len(line) for line in table.splitlines()) <= 100
    row = table.splitlines()[5].split()
    assert row[-2:] == ["299", "6-8"]  # classes that get samples, and how many each
    assert table.splitlines()[6].split()[-2:] == ["0", "."]


# --------------------------------------------------------------------------------------------------- counts in files


def written(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "[[1, 2, 3], [4, 0, 6]]"),
        ("a.csv", "0,1,2\n1,2,3\n4,0,6\n"),
        ("a.csv", ",0,1,2\n0,1,2,3\n1,4,0,6\n"),
        ("a.csv", "# cat,dog,ship\n1.000000000000000000e+00,2e0,3.0E+00\n4.0,0.000e+00,60e-1\n"),
        ("a.CSV", "\ufeffcat, dog, ship\r\n1, 2, 3\r\n4, 0, 6\r\n\r\n"),
        ("a.csv", "client,cat,dog,ship\n0,1,2,3\n1,4,0,6\n"),
        ("a.csv", ",cat,dog,ship\nhospital a,1,2,3\nhospital b,4,0,6\n"),
        ("a.csv", "ID,0,1,2\n7,1,2,3\n9,4,0,6\n"),
        ("a.csv", " Index ,cat,dog,ship\n,1,2,3\n,4,0,6\n"),
        ("a.csv", '"cat","dog","a ship, or a boat"\n1,2,3\n4,0,6'),
        ("a.csv", "cat,dog,ship\n1.0,2.0,3.\n4.0,0.0,6.00\n"),
        ("a.csv", "site;cat, or kitten;dog;ship\na;1;2;3\nb;4;0;6\n"),
        ("a.tsv", "Client ID\tcat\tdog\tship\n1\t1\t2\t3\n2\t4\t0\t6\n"),
        ("a.csv", "client,class,count\nb,cat,1\na,ship,6\na,cat,4\nb,ship,3\nb,dog,2.0\n"),
        ("a.csv", "site_name;label;n\nb;2;1\na;10;0\na;11;6\na;2;4\nb;11;3\nb;10;2\n"),
    ],
)
def test_read_counts_accepts_each_format(tmp_path: Path, name: str, content: str) -> None:
    counts = read_counts(written(tmp_path, name, content)).counts
    assert counts.dtype == np.int64
    assert counts.tolist() == [[1, 2, 3], [4, 0, 6]]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("1,2\n", []),
        ("0,1\n", []),  # the only line
        ("2,3\n1,2\n", []),
        ("0,1\n1,2\n", ["0", "1"]),
        ("1,2\n3,4\n", ["1", "2"]),  # labels from 1
        (",2,5\na,3,4\n", ["2", "5"]),
        ("# 0,1\n3,4\n", ["0", "1"]),
        ("#cat,dog\n3,4\n", ["cat", "dog"]),
        ("cat, dog\n1,2\n", ["cat", "dog"]),
        ("client,cat,dog\n0,1,2\n", ["cat", "dog"]),
        ("ID,0,1\n7,1,2\n", ["0", "1"]),
    ],
)
def test_read_counts_takes_class_names_from_the_header(tmp_path: Path, content: str, names: list[str]) -> None:
    assert read_counts(written(tmp_path, "a.csv", content)).classes == names


def test_header_of_numbers_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "a.csv", "\n0,1,2\n10,3,5\n5,1,9\n")
    assert read_counts(path).counts.tolist() == [[10, 3, 5], [5, 1, 9]]
    (warning,) = caplog.messages
    assert str(path) in warning and "line 2" in warning and "class" in warning


@pytest.mark.parametrize(
    "header",
    ["client_id", "Client-ID", "hospital", "collection site", "node", "NAME", "customer_name", "index", "id", ""],
)
def test_first_column_named_as_id_holds_the_names_of_clients(tmp_path: Path, header: str) -> None:
    found = read_counts(written(tmp_path, "a.csv", f"{header},cat,dog,bird\n1,120,3,0\n2,0,80,62\n"))
    assert (found.classes, found.clients) == (["cat", "dog", "bird"], ["1", "2"])
    assert found.counts.sum() == 265


@pytest.mark.parametrize(
    ("content", "classes"),
    [
        ("covid,flu\n7,8\n9,3\n", ["covid", "flu"]),  # ends with id, but is no word of its own
        ("patients,lymph_node,client_id\n7,0,5\n9,1,5\n", ["patients", "lymph_node", "client_id"]),
        ("kidney,identity\n1,8\n3,3\n", ["kidney", "identity"]),
        ("cat,dog\n1,5\n", ["cat", "dog"]),  # one row counts nothing
        ("cat,dog\n1,5\n1,6\n", ["cat", "dog"]),
        ("cat,dog,total\n7,5,9\n2,1,3\n", ["cat", "dog", "total"]),  # not their sum in every row
        ("cat,dog\n1,5\n1,6\n2,11\n", ["cat", "dog"]),  # the last row has no name
        ("cat,all\n7,7\n2,2\n", ["cat", "all"]),  # the sum of a single column
        ("total,cat,dog\n12,7,5\n3,2,1\n", ["total", "cat", "dog"]),  # not the last column
    ],
)
def test_other_columns_are_classes(tmp_path: Path, content: str, classes: list[str]) -> None:
    found = read_counts(written(tmp_path, "a.csv", content))
    assert (found.classes, found.clients) == (classes, [])
    assert found.counts.shape[1] == len(classes)


def test_client_named_total_may_have_its_own_counts(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "id,cat,dog\nUnited,1,2\nTotal,5,7\n")
    assert read_counts(path).clients == ["United", "Total"]


def test_id_column_option_decides(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "ward,0,1\n0,5,6\n1,7,8\n")
    named = read_counts(path, id_column="ward")
    assert (named.counts.tolist(), named.classes, named.clients) == ([[5, 6], [7, 8]], ["0", "1"], ["0", "1"])
    path = written(tmp_path, "b.csv", "lymph_node,skin\n1,6\n2,8\n")
    assert read_counts(path).counts.tolist() == [[6], [8]]
    assert read_counts(path, id_column="none").counts.tolist() == [[1, 6], [2, 8]]
    bare = written(tmp_path, "c.csv", "0,6\n1,8\n")
    assert read_counts(bare, id_column="none").counts.tolist() == [[0, 6], [1, 8]]
    with pytest.raises(ValueError, match="id-column = 'skin': must be none or the first column's header, 'lymph_node'"):
        read_counts(path, id_column="skin")
    with pytest.raises(ValueError, match="id-column = 'ward': must be none, since the file has no header"):
        read_counts(bare, id_column="ward")
    with pytest.raises(ValueError, match="id-column = 'ward': must be left out"):
        read_counts(written(tmp_path, "a.json", "[[1, 2]]"), id_column="ward")


def test_long_format_keeps_names_and_fills_zeros(tmp_path: Path) -> None:
    found = read_counts(written(tmp_path, "a.csv", "hospital,label,count\nB,dog,5\nA,cat,7\nA,ant,1\n"))
    assert (found.clients, found.classes) == (["B", "A"], ["ant", "cat", "dog"])
    assert found.counts.tolist() == [[0, 0, 5], [1, 7, 0]]


def test_plan_shows_the_names_of_clients() -> None:
    result = plan(clients=["St. Mary's", "b\nTo generate: 0\x1b[2J", "x" * 90, ""])
    assert result["clients"][0]["name"] == "St. Mary's"
    assert [client["client"] for client in result["clients"]] == [0, 1, 2, 3]
    rows = format_table(result).splitlines()[4:8]
    assert rows[0].split()[:2] == ["St.", "Mary's"] and "b To generate: 0" in rows[1]
    assert "x" * 39 + "…" in rows[2] and rows[3].split()[0] == "3"
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "1,2", "must be a .json or a .csv file"),
        ("a.json", "[[1, 2], [3]]", "row 2 has 1 class, must have 2"),
        ("a.json", "[[1, -2]]", "row 1, column 2 is '-2', must be an integer from 0"),
        ("a.json", "[[1, 2.0]]", "row 1, column 2 is '2.0'"),
        ("a.json", "[[1, true]]", "column 2 is 'True'"),
        ("a.json", "[[1, null]]", "column 2 is 'None'"),
        ("a.json", "[[1, NaN]]", "column 2 is 'nan'"),
        ("a.json", f"[[1, {2**41}]]", "column 2 is '2199023255552'"),
        ("a.json", "[]", "holds no counts"),
        ("a.json", "[[]]", "holds no counts"),
        ("a.json", '{"counts": [[1]]}', "must be a list of rows"),
        ("a.json", "[1, 2]", "must be a list of rows"),
        ("a.json", "[[1, 2]", "not valid JSON"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.json", b"\xff\xfe\x00", "UTF-8"),
        ("a.csv", "", "holds no counts"),
        ("a.csv", "cat,dog\n", "holds no counts"),
        ("a.csv", "client\n3\n", "holds no counts"),
        ("a.csv", "client,cat\na,x\n", "line 2, column 2 is 'x'"),  # as in the file, with the clients' names
        ("a.csv", "client,cat\n0,1\n1\n", "line 3 has 0 classes"),
        ("a.csv", ",4,2\n3,4,1\n", "line 1, column 1 is ''"),
        ("a.csv", "3,2\n3\n", "line 2 has 1 class, "),
        ("a.csv", "cat,dog,ship\n1,2\n", "the header has 3 columns, the first row 2"),
        ("a.csv", "1,2\n3,x\n", "line 2, column 2 is 'x'"),
        ("a.csv", "1,x\n3,4\n", "line 1, column 2 is 'x'"),
        ("a.csv", "1,2.5\n", "line 1, column 2 is '2.5'"),
        ("a.csv", "1,-3\n", "line 1, column 2 is '-3'"),
        ("a.csv", "1,\n", "line 1, column 2 is ''"),
        ("a.csv", "1," + "9" * 5000, "line 1, column 2 is '999"),
        ("a.csv", "1,1_000", "line 1, column 2 is '1_000'"),
        ("a.csv", "1,120.5", "line 1, column 2 is '120.5'"),
        (
            "a.csv",
            "ward,cat\n0,5\n1,6\n",
            "first column, 'ward', counts 0 to 1; .*--id-column 'ward'; .*--id-column none",
        ),
        ("a.csv", "ward,cat\n1.0,5\n2.0,6\n", "first column, 'ward', counts 1 to 2"),
        ("a.csv", "0,5\n1,6\n2,9\n", "first column counts 0 to 2; .* header .*--id-column none"),
        ("a.csv", "ward,cat\nA,5\nB,6\n", "line 2, column 1 is 'A', .*--id-column 'ward'"),
        ("a.csv", "id,cat,dog,Total\na,1,2,3\nb,4,5,9\n", "column 'Total' is the sum of the others; remove it"),
        ("a.csv", "cat;dog;sum\n1;2;3\n3;5;8\n", "column 'sum' is the sum"),
        ("a.csv", "\nid,cat,dog,cat\na,1,2,3\n", "line 2 repeats class 'cat'"),
        ("a.csv", "id,cat\na,1\nb,2\n\na,3\n", "line 5 repeats client 'a'"),
        ("a.csv", "id,cat,dog\na,1,2\nb,4,5\nTotal,5,7\n", "line 4, 'Total', is the sum of the others; remove it"),
        ("a.csv", "id,cat\na,1\nsum,1\n", "line 3, 'sum', is the sum"),
        ("a.csv", "client,class,count\na,cat,1\na,cat,2\n", "line 3 repeats client 'a' and class 'cat'"),
        ("a.csv", "client,class,count\na,cat,-1\n", "line 2, column 3 is '-1'"),
        ("a.csv", "client,class,count\na,cat\n", "line 2 has 2 columns, must have 3"),
        ("a.csv", "client,class,count\n", "holds no counts"),
        ("a.csv", "cat,dog\n\n1,2\n\n\n3,x\n", "line 6, column 2 is 'x'"),  # as an editor counts
        ("a.csv", 'site,cat\n"a\nb",1\nc,x\n', "line 4, column 2 is 'x'"),
    ],
)
def test_invalid_counts_files_are_rejected_in_one_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_counts(written(tmp_path, name, content))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert len(str(caught.value)) < 300


def test_long_format_of_too_many_pairs_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_file, "MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match="9 clients by 9 classes are too many, at most 50 counts"):
        read_counts(written(tmp_path, "a.csv", "id,class,n\n" + "".join(f"{i},{i},1\n" for i in range(9))))


def test_missing_counts_file_and_folder_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read, No such file"):
        read_counts(tmp_path / "none.json")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        read_counts(tmp_path / "folder.csv")


def test_counts_file_too_large_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_file, "MAX_FILE_BYTES", 2**20)
    with pytest.raises(ValueError, match="too large, at most 1 MiB"):
        read_counts(written(tmp_path, "a.csv", "1," * 2**20))
