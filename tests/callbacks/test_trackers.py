"""What TensorBoard, Weights & Biases, MLflow and Prometheus read of a run equals its rounds.jsonl."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import users_callbacks
from fake_runs import write_run
from runners import finish, quick

from fedeas_flwr.callbacks.interface import curves
from fedeas_flwr.callbacks.metrics import MetricsEndpoint
from fedeas_flwr.callbacks.registry import open_callbacks
from fedeas_flwr.runs.directory import RunDirectory


def run_and_resume(folder: Path, callbacks: str) -> RunDirectory:
    """Return a run of three rounds that was interrupted after its checkpoint of the first round."""
    config = quick(folder, policy="none", rounds=2, callbacks=callbacks)
    run = finish(config)
    run.return_to_previous_checkpoint()
    (run.path / "summary.json").unlink()
    finish(config.with_changes(resume=True, rounds=3))
    assert run.warnings() == {}
    return run


def values_by_round(run: RunDirectory) -> dict[int, dict[str, float]]:
    """Return round → its numbers by name, without seconds, which differ when a round is repeated."""
    return {record["round"]: without_seconds(dict(curves(record))) for record in run.rounds()}


def without_seconds(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith("seconds/")}


def test_curves_of_a_round() -> None:
    record = {"round": 3, "accuracy": 0.5, "gamma_hat": None, "clients": [1, 2], "failures": [], "worst_client": 2}
    record |= {"per_class_accuracy": [0.1, None], "seconds": {"clients": 2}}
    assert dict(curves(record)) == {"accuracy": 0.5, "per_class_accuracy/0": 0.1, "seconds/clients": 2.0}


def test_tensorboard_reads_every_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_and_resume(tmp_path / "run", "tensorboard")
    found = EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    accuracy = [(event.step, event.value) for event in found.Scalars("accuracy")]
    assert accuracy == [(r["round"], pytest.approx(r["accuracy"])) for r in run.rounds()] and len(accuracy) == 3
    assert "seconds/clients" in found.Tags()["scalars"] and "per_class_accuracy/9" in found.Tags()["scalars"]


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run with wandb's own reader."""
    reader = pytest.importorskip("wandb.sdk.internal.datastore", reason="from 0.30 on, wandb has no reader in Python")
    from wandb.proto import wandb_internal_pb2

    store = reader.DataStore()
    store.open_for_scan(str(path))
    while data := store.scan_data():
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def test_wandb_reads_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = run_and_resume(tmp_path / "run", "wandb(project=tests mode=offline)")
    parts = sorted(run.path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(parts) == 2 and {part.name for part in parts} == {f"run-{run.identity()}.wandb"}, "another run was begun"
    found: dict[int, dict[str, float]] = {}
    for part in parts:
        for record in wandb_records(part):
            if record.WhichOneof("record_type") == "run":
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert record.run.project == "tests" and config["policy"] == "none" and config["run-dir"] == ""
            elif record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                values = {name: json.loads(value) for name, value in items.items() if not name.startswith("_")}
                found.setdefault(record.history.step.num, without_seconds(values))
    assert found == values_by_round(run) and len(found) == 3


def test_mlflow_reads_every_round_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "store"
    run = run_and_resume(tmp_path / "run", f"mlflow(uri={store} experiment=tests)")
    client = mlflow.MlflowClient(tracking_uri=str(store))
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["policy"] == "none" and found.data.params["run-dir"] == ""
    assert found.data.metrics["summary/last_20"] == run.summary()["last_20"]
    for name in values_by_round(run)[1]:
        history = client.get_metric_history(found.info.run_id, name)
        read = [(metric.step, metric.value) for metric in history]
        assert sorted(read) == [(number, values[name]) for number, values in values_by_round(run).items()], name


def test_a_failed_run_is_failed_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    callbacks = open_callbacks("mlflow")
    callbacks.start_run(write_run(tmp_path / "run", [0.5]).config(), [])
    callbacks.close()
    client = mlflow.MlflowClient(tracking_uri=str(tmp_path / "store"))
    (found,) = client.search_runs([client.get_experiment_by_name("fedeas").experiment_id])
    assert found.info.status == "FAILED" and callbacks.warnings == {}


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return int(any_socket.getsockname()[1])


def samples(text: str) -> dict[str, float]:
    """Return the samples of a scrape by name and labels, read with Prometheus' client library."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_every_round(tmp_path: Path) -> None:
    users_callbacks.SCRAPED.clear()
    port = free_port()
    run = run_and_resume(tmp_path / "run", f"metrics(port={port}), users_callbacks:Scrape(port={port})")
    rounds, scraped = run.rounds(), users_callbacks.SCRAPED
    assert "fedeas_rounds_done 3\n" in scraped[-1] and len(scraped) == 4, "round 2 was repeated"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    last = samples(scraped[-1])
    assert [samples(text)["fedeas_accuracy"] for text in scraped[2:]] == [r["accuracy"] for r in rounds[1:]]
    clients = sum(record["seconds"]["clients"] for record in rounds)
    assert last["fedeas_seconds_totalclients"] == pytest.approx(clients) and last["fedeas_rounds_planned"] == 3
    assert last["fedeas_clients_present"] == 4 and last["fedeas_images_generated_total"] == 0
    assert last["fedeas_replies_refused_total"] == 0


def test_metrics_before_the_first_round_and_with_lost_replies(tmp_path: Path) -> None:
    config = quick(tmp_path / "run")
    failures = [{"client": 1, "reason": "its node is offline"}]
    record = {"round": 1, "accuracy": 0.5, "failures": failures, "generated": 7, "not_joined": 1, "seconds": {}}
    endpoint, scrape = MetricsEndpoint(port=(port := free_port())), users_callbacks.Scrape(port)
    users_callbacks.SCRAPED.clear()
    endpoint.on_run_start(config, [])
    try:
        scrape.on_round_end({})
        endpoint.on_round_end(record)
        scrape.on_round_end({})
        scrape.address = scrape.address.replace("metrics", "")
        with pytest.raises(OSError, match="404"):
            scrape.on_round_end({})
        taken = open_callbacks(f"metrics(port={port})")
        taken.start_run(config, [])
        assert "Address already in use" in taken.warnings["metrics"]
        taken.close()
    finally:
        endpoint.close()
    before, after = users_callbacks.SCRAPED
    assert samples(before) == {"fedeas_rounds_planned": 3, "fedeas_rounds_done": 0, "fedeas_replies_refused_total": 0}
    assert samples(after)["fedeas_replies_refused_total"] == 1 and samples(after)["fedeas_clients_present"] == 3
    assert samples(after)["fedeas_images_generated_total"] == 7
