"""The real clients, with some replies lost or corrupted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedeas_flwr import client_app
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.records import ARRAYS, EXTRA, to_arrays, to_record
from fedeas_flwr.strategies.registry import build_strategy


def lossy_app(fate: Callable[[int, int], str]) -> ClientApp:
    """Return clients whose replies ``fate(client, round)`` can change: "lost", "NaN", or neither.

    In any case the client has trained, and kept its state.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return client_app.query(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number, client = messages.read_task(message).round, int(context.node_config["partition-id"])
        reply = client_app.train_client(message, context)
        if fate(client, number) == "lost":
            raise TimeoutError("the reply was lost")
        if fate(client, number) == "NaN":
            name = EXTRA if EXTRA in reply.content else ARRAYS
            arrays = to_arrays(reply.content.array_records[name])
            first = next(iter(arrays))
            reply.content[name] = to_record({**arrays, first: arrays[first] * np.nan})
        return reply

    return app


def federation(config: RunConfig, app: ClientApp) -> Federation:
    """Return a federation of these clients, ready to train."""
    grid = InlineGrid(app, config.clients, config.to_user_dict())
    made = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    made.clients.discover()
    made.clients.plan()
    return made
