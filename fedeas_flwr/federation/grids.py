"""Two grids in addition to Flower's: one calls the ClientApp in this process, one shows some nodes of another grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedeas_flwr.data.node import SIMULATED
from fedeas_flwr.federation.flower_internals import Run, identify_process, set_message_id
from fedeas_flwr.federation.messages import error_reply


class _SendAndReceiveGrid(Grid):
    """Base of both grids, which send by `send_and_receive` only; pushing and pulling are unsupported."""

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("this grid belongs to one run")

    @property
    def run(self) -> Run:
        raise NotImplementedError("this grid has no Flower run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("use send_and_receive")


class InlineGrid(_SendAndReceiveGrid):
    """Calls the same ClientApp for every node in this process: no Ray, no pickling, breakpoints work.

    Each of the threads, ``workers``, runs one client at a time; on a GPU each has its own stream. With
    ``by_reference``, the server passes models to the clients as tensors, not as bytes.
    """

    def __init__(
        self, app: ClientApp, clients: int, run_config: Mapping[str, Any], workers: int = 1, by_reference: bool = False
    ) -> None:
        identify_process()
        self._app, self.by_reference = app, by_reference
        self._pool = ThreadPoolExecutor(workers) if workers > 1 else None
        self._contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": clients, SIMULATED: True},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for node in range(1, clients + 1)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return an iterator over the replies, in the order of the messages; ``timeout`` is ignored.

        Without threads, a message is handled when its reply is requested.
        """
        sent = list(messages)
        for message in sent:
            set_message_id(message)
        return (self._pool.map if self._pool else map)(self._deliver, sent)

    def close(self) -> None:
        """Stop the workers after their current messages, without waiting for them; drop the queued messages."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)  # an interrupted run does not wait for epochs

    def _deliver(self, message: Message) -> Message:
        try:
            return self._app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # an error reply, as on Flower's own grids
            return error_reply(message, error)


class GridView(_SendAndReceiveGrid):
    """Shows only some nodes of another grid, so that a strategy samples exactly those."""

    def __init__(self, grid: Grid, nodes: Iterable[int]) -> None:
        self._grid, self._nodes = grid, list(nodes)

    def get_node_ids(self) -> Iterable[int]:
        return self._nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)
