"""Testing the global model where the test data is: every client scores it on images of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.serverapp import Grid

from fedeas_flwr import messages
from fedeas_flwr.array_records import to_record
from fedeas_flwr.checkpoints import Checkpoint
from fedeas_flwr.config import RunConfig
from fedeas_flwr.errors import MessageError, RunError
from fedeas_flwr.strategies.delivery import deliver


def ask_clients_to_test(grid: Grid, config: RunConfig, nodes: Mapping[int, int], state: Checkpoint) -> dict[str, Any]:
    """Ask the clients that are there (client → node) for their scores, and return the round's."""
    model, buffers = to_record(state.trainable), to_record(state.buffers)
    questions = [messages.evaluate_message(node, model, buffers) for node in nodes.values()]
    reports = []
    failed = f"no reply within {config.round_timeout:g} s"
    clients = {node: client for client, node in nodes.items()}
    for node, reply in deliver(grid, questions, config.round_timeout).items():
        client = clients[node]
        try:
            if reply.has_error():
                raise MessageError(messages.failure_reason(reply))
            reports.append(messages.read_evaluate_reply(reply, client))
        except MessageError as error:
            failed = f"client {client}: {error}"
    if len(reports) < config.enough_of(len(questions)):
        missing = len(questions) - len(reports)
        raise RunError(
            f"evaluation: {missing} of {len(questions)} clients failed and min-replies = "
            f"{config.min_replies:g} does not allow it; {failed}"
        )
    reports = sorted((r for r in reports if r.examples), key=lambda r: r.client)
    if not reports:
        raise RunError("evaluation: no client has test data of its own")
    examples = sum(r.examples for r in reports)
    own = {r.client: r.correct / r.examples for r in reports}
    worst = min(own, key=lambda client: own[client])
    return {
        "accuracy": sum(r.correct for r in reports) / examples,
        "mean_client_accuracy": sum(own.values()) / len(own),
        "worst_client_accuracy": own[worst],
        "worst_client": worst,
        "loss": sum(r.loss * r.examples for r in reports) / examples,
    }
