"""Row 8: fuzzed input of every kind. No traceback, no hang, no partial write, and the documented exit codes.

Hypothesis draws the cases from a seed that it derives from a test's source and name: renaming a test changes its cases.
A finding becomes an `@example`.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runners import run_in_process
from test_cache import Fake
from test_generators import save_tiny
from test_messages import COUNTERS, TRAINABLE, reply

from fedeas_flwr import client_app
from fedeas_flwr.common.errors import ConfigError, MessageError
from fedeas_flwr.config import KEYS, RunConfig, parse_config
from fedeas_flwr.config_files import read_config
from fedeas_flwr.data.own_dataset import read_dataset
from fedeas_flwr.data.own_images import MAX_CLASSES
from fedeas_flwr.data.sources import check_npz
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.generators.bank import BankGenerator
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.records import to_record

Words = list[str]


def cases(few: int) -> Callable[[Any], Any]:
    """Return a decorator that runs ``few`` fixed cases and fails if one takes 20 seconds of CPU time."""
    same_for_all = settings(
        max_examples=few,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )

    def decorate(test: Any) -> Any:
        case = test.hypothesis.inner_test

        @wraps(case)
        def timed(*given: Any, **named: Any) -> None:
            began = time.thread_time()  # Hypothesis's own deadline counts wall-clock time
            case(*given, **named)
            assert time.thread_time() - began < 20

        test.hypothesis.inner_test = timed
        return same_for_all(test)

    return decorate


def ends_in_one_line(*words: str) -> None:
    """Run a command and check that it fails with exit code 2 and a one-line error."""
    done = run_in_process(*words)
    assert done.returncode == 2, words
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def ends_well(*words: str) -> None:
    """Run a command and check that it succeeds or fails with a one-line error."""
    done = run_in_process(*words)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or (done.returncode in (1, 2) and done.stderr.count("\n") <= 1), done


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
damage = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "zero"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)
)


def damaged(content: bytes, how: tuple[str, float, bytes]) -> bytes:
    kind, where, more = how
    at = min(len(content) - 1, int(where * len(content)))
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + more + content[at:]
    if kind == "zero":
        return content[:at] + bytes(len(more)) + content[at + len(more) :]
    return content[:at] + bytes([content[at] ^ (more[0] or 1)]) + content[at + 1 :]


# ---------------------------------------------------------------------------------------------- run-configs


@pytest.mark.slow
@cases(120)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=12), anything, min_size=1, max_size=4))
@example({"clients": 10**400})
@example({"alpha": float("nan")})
@example({"run-dir": "/\0"})
@example({"rounds": True})
@example({"model": "\ud800"})
def test_run_configs(values: dict[str, Any]) -> None:
    try:
        config = parse_config(values)
    except ConfigError as error:
        assert "\n" not in str(error).strip("\n") or any("\n" in str(value) for value in (*values, *values.values()))
        return
    assert isinstance(config, RunConfig)
    assert all(not isinstance(v, float) or math.isfinite(v) for v in config.to_user_dict().values())


@cases(60)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="ignore")))
@example(b"rounds = " + b"[" * 5000)
@example(b"rounds = 1" + b"0" * 5000)
@example(b"\xff\xfe")
def test_toml_files(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conf.toml"
        path.write_bytes(content)
        try:
            read_config(path)
        except ConfigError:
            done = run_in_process("run", str(path), f"run-dir={folder}/r")
            assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert [p.name for p in Path(folder).iterdir()] == ["conf.toml"], (
            "nothing is begun for a config that is refused"
        )


@pytest.mark.slow
@cases(40)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=15), max_size=3))
def test_commands_and_words(words: Words) -> None:
    if words and words[0] in ("quickstart", "doctor", "run", "sweep", "generate"):
        return
    ends_well(*words)


# ---------------------------------------------------------------------------------------------- count files


@pytest.mark.slow
@cases(60)
@given(anything)
@example([[1, 2], [3]])
@example([[2**63, 1]])
@example([[1e308, 1]])
@example([["1", 2]])
@example([])
def test_count_files_of_json(content: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        path.write_text(json.dumps(content))
        ends_well("plan", "--counts", str(path))


@cases(40)
@given(st.sampled_from(["json", "csv", "txt", "npy"]), st.binary(max_size=80) | st.just(b"[" * 100_000))
@example("csv", b"1,2\n3\n")
@example("csv", b"1,2\n3,nan\n")
@example("json", b"[" * 100_000)
def test_count_files_of_bytes(kind: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"counts.{kind}"
        path.write_bytes(content)
        ends_well("plan", "--counts", str(path))


# ------------------------------------------------------------------------------------------------ npz files


def bank_bytes() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.arange(640, dtype=np.uint8).reshape(10, 8, 8, 1), y=np.arange(10))
    return buffer.getvalue()


BANK = bank_bytes()


@cases(80)
@given(damage)
def test_damaged_archives(how: tuple[str, float, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bank.npz"
        path.write_bytes(damaged(BANK, how))
        try:
            made = BankGenerator(path, classes=tuple("0123456789"), image_shape=(8, 8, 1))
        except ValueError as error:
            assert str(error).startswith("generator: bank ") and "\n" not in str(error)
        else:
            assert made.num_classes == 10


@cases(40)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=10, max_size=10))
@example([0, 10**9] * 5)
@example([2**63 - 1] * 10)
def test_archives_with_any_labels(labels: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.npz"
        np.savez(path, x=np.zeros((10, 8, 8, 1), np.uint8), y=np.array(labels, np.int64))
        try:
            found = read_dataset(path)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert 2 <= len(found[1]) <= MAX_CLASSES


@cases(40)
@given(st.binary(max_size=300))
def test_archives_whose_headers_are_nonsense(header: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cifar10.npz"
        with zipfile.ZipFile(path, "w") as file:
            for key in ("x_train", "y_train", "x_test", "y_test"):
                file.writestr(f"{key}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        with pytest.raises(ValueError, match=r"^dataset cifar10: "):
            check_npz("cifar10", path)


# -------------------------------------------------------------------------------------------- model folders


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def opens_or_is_refused(model_folder: Path, file: str, content: bytes) -> None:
    """Replace one file of a model folder and check that it opens or raises a one-line error."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model"
        shutil.copytree(model_folder, copy)
        (copy / file).write_bytes(content)
        try:
            DiffusionGenerator(copy, num_classes=3, steps=2)
        except (ValueError, FileNotFoundError) as error:
            assert "\n" not in str(error)


@pytest.mark.slow
@cases(40)
@given(file=st.sampled_from(["unet/config.json", "scheduler/scheduler_config.json"]), data=st.data())
def test_model_folders_with_other_numbers(model_folder: Path, file: str, data: st.DataObject) -> None:
    content = json.loads((model_folder / file).read_text())
    key = data.draw(st.sampled_from(sorted(content)))
    content[key] = data.draw(anything)
    opens_or_is_refused(model_folder, file, json.dumps(content).encode())


@pytest.mark.slow
@cases(40)
@given(
    file=st.sampled_from(
        ["unet/config.json", "scheduler/scheduler_config.json", "unet/diffusion_pytorch_model.safetensors"]
    ),
    how=damage,
)
@example("unet/config.json", ("zero", 0.0, b"["))
def test_damaged_model_folders(model_folder: Path, file: str, how: tuple[str, float, bytes]) -> None:
    opens_or_is_refused(model_folder, file, damaged((model_folder / file).read_bytes(), how))


# ------------------------------------------------------------------------- cache manifests, run directories


@pytest.mark.slow
@cases(40)
@given(st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"generator": ["a"], "seed": {}}')
def test_cache_manifests(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDEAS_CACHE", folder)
        ImageCache().ensure(Fake(), seed=0, client=0, wanted=[1, 0, 0])
        (manifest,) = Path(folder).rglob("manifest.json")
        manifest.write_bytes(content)
        for words in (["cache", "ls"], ["cache", "verify"], ["cache", "prune", "--key", "zz"]):
            done = run_in_process(*words)
            assert done.returncode == 0, done.stderr


FILES = ["config.json", "status.json", "summary.json", "rounds.jsonl", "checkpoint.safetensors", "model.safetensors"]


@pytest.mark.slow
@cases(30)
@given(
    file=st.sampled_from(FILES),
    content=st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()),
)
@example("status.json", b"[" * 100_000)
@example("status.json", b"[]")
@example("rounds.jsonl", b"{}\n")
@example("summary.json", b"null")
def test_run_directories(file: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.start(parse_config({"run-dir": folder, "clients": 2}), {})
        run.save_summary({"rounds": 0})
        run.set_status("failed", "once")
        (run.path / file).write_bytes(content)
        ends_well("runs", "ls", folder)
        ends_well("runs", "show", folder)
        ends_in_one_line("evaluate", folder)
        if file == "config.json":
            ends_in_one_line("resume", folder)


# ------------------------------------------------------------------------------------------------- messages

values = st.none() | st.integers(-(2**62), 2**62) | st.floats() | st.lists(st.integers(0, 9), max_size=3)
arrays = st.builds(
    lambda dtype, shape, stype, data: Array(dtype=dtype, shape=shape, stype=stype, data=data),
    st.sampled_from(["float32", "float64", "object", "int64", ""]),
    st.sampled_from([(2, 3), (3,), (1,), (), (-1,), (2**40,)]),
    st.sampled_from(["numpy.ndarray", "pickle"]),
    st.binary(max_size=60) | st.just(to_record(TRAINABLE)["w"].data),
)


@cases(120)
@given(data=st.data())
def test_replies(data: st.DataObject) -> None:
    InlineGrid(client_app.app, 1, {})
    message = reply()
    content = RecordDict(dict(message.content.items()))
    where = data.draw(st.sampled_from(["arrays", "buffers", "metrics", "extra", "config"]))
    if where == "metrics":
        numbers: dict[str, Any] = dict(content.metric_records["metrics"].items())
        key, value = data.draw(st.sampled_from(sorted(numbers)) | st.just("more")), data.draw(values)
        numbers.pop(key, None)
        content[where] = MetricRecord(numbers if value is None else {**numbers, key: value})
    elif where == "config":
        content[where] = ConfigRecord({"a": 1})
    else:
        record = dict(content.array_records.get(where, ArrayRecord()).items())
        record[data.draw(st.sampled_from(["w", "b", "n", "z"]))] = data.draw(arrays)
        content[where] = ArrayRecord(record)
    message.content = content
    try:
        report, _ = messages.read_train_reply(message, 5, TRAINABLE, COUNTERS, {})
    except MessageError as error:
        assert "\n" not in str(error)
    else:
        assert report.examples >= 1 and math.isfinite(report.loss)


@cases(40)
@given(st.dictionaries(st.sampled_from(["client-id", "total", "absent", "x"]), values.filter(lambda v: v is not None)))
def test_answers(numbers: dict[str, Any]) -> None:
    InlineGrid(client_app.app, 1, {})
    asked = messages.build_query(1, "plan")
    answer = Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=asked)
    try:
        found = messages.read_answer(answer, "total", "absent")
    except MessageError:
        return
    assert all(isinstance(number, int) and number >= 0 for number in found)
