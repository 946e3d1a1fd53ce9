"""Start a run, show its progress, know how it really ended, and leave nothing running.

`flwr run` of Flower 1.41 returns success whatever happens, finds a SuperLink by its port, and leaves one behind. So a
run through Ray gets a SuperLink of its own as a child, with its own port, home and folder for Ray; the run's state is
read from its run directory; and at the end every process that the run started is ended.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from fedeas_flwr.common.devices import pick_device
from fedeas_flwr.common.errors import ProcessesDiedError, RunFailedError
from fedeas_flwr.common.processes import ProcessTree, is_alive
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.config import RunConfig
from fedeas_flwr.launch.mps import may_share_gpu, shared_gpu
from fedeas_flwr.launch.progress import GenerationProgress, RoundProgress
from fedeas_flwr.launch.resources import clients_at_once, ray_resources
from fedeas_flwr.launch.superlink import own_environment, run_flwr_json, stage_app, start_superlink
from fedeas_flwr.runs.directory import RunDirectory


def launch(config: RunConfig, console: Console) -> RunDirectory:
    """Run ``config`` to its end on the backend it names.

    Raises
    ------
    RunError
        If the run could not start; as `RunFailedError` if it did not finish. The text is one line.
    KeyboardInterrupt
        If the user stopped it; the run directory can be resumed.
    """
    # The folder, its config and a fresh status are there before anything slow starts: a refusal is immediate, an old
    # status cannot be taken for this run's, and Ctrl-C at any moment leaves something to resume.
    environment = describe_environment("not known yet")  # first, since it takes a while: two could pass the next line
    RunDirectory(Path(config.run_dir)).refuse_if_it_runs()
    run = RunDirectory.start(config, environment)
    before = len(run.rounds())
    images = GenerationProgress(config) if config.generates else None
    with RoundProgress(run, config.rounds, before, console, images) as progress:
        try:
            if config.backend == "inline":
                _run_inline(config, run, progress)
            else:
                _run_ray_on(config, run, progress, console)
        except KeyboardInterrupt:
            # A run that has already finished or failed keeps its status, unless it failed because processes died:
            # that one would have been resumed.
            if run.status()[0] not in ("finished", "failed") or run.has_died():
                run.set_status("interrupted")
            raise
        finally:
            progress.update()
    status, error = run.status()
    if status != "finished":
        raise RunFailedError(error or f"the run ended as '{status}'; see {run.path / 'flower.log'}")
    return run


# ----------------------------------------------------------------------------------------------- inline


def _run_inline(config: RunConfig, run: RunDirectory, progress: RoundProgress) -> None:
    from flwr.app import Context, RecordDict

    from fedeas_flwr import client_app, server_app
    from fedeas_flwr.federation.grids import InlineGrid

    values = config.to_user_dict()
    with _quiet_terminal(), progress.in_background():
        on_gpu = pick_device(config.device) == "cuda"
        workers = clients_at_once(config, on_gpu) if on_gpu else config.actors or 1
        grid = InlineGrid(client_app.app, config.clients, values, workers, by_reference=on_gpu)
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values)
        try:
            server_app.app(grid, context)
        except SystemExit as error:  # its code may be 0, and the run is not done
            raise RunFailedError(f"the run was interrupted: something in it left with code {error.code}") from error
        except Exception as error:
            if run.status()[0] not in ("failed", "unknown"):
                raise
            raise RunFailedError(run.status()[1] or str(error)) from error
        finally:
            grid.close()


@contextmanager
def _quiet_terminal() -> Iterator[None]:
    """Take Flower's log off the terminal; the ServerApp writes it to the run directory."""
    logger = logging.getLogger("flwr")
    before = list(logger.handlers)
    logger.handlers = []
    try:
        yield
    finally:
        logger.handlers = before


# -------------------------------------------------------------------------------------------------- ray


def _run_ray_on(config: RunConfig, run: RunDirectory, progress: RoundProgress, console: Console) -> None:
    """Run, and where processes died under the run go on from its checkpoint in fresh ones.

    A client process that dies poisons its place in Flower's pool for good, and one that is left may be too few. Only
    restarts without a new round are counted: what dies every hour may go on for ever, what dies at once does not.
    """
    vain = 0
    while True:
        done = len(run.rounds())
        try:
            _run_ray(config, run, progress)
            why = run.status()[1] if run.has_died() else ""
        except ProcessesDiedError as error:
            why = str(error)
        if not why:
            return
        vain = 0 if len(run.rounds()) > done else vain + 1
        if vain > config.restarts:
            run.set_status("failed", why, died=True)
            return
        console.print(f"processes died ({why}); going on from the last checkpoint", highlight=False, soft_wrap=True)
        config = config.with_changes(resume=True)
        run.set_status("running", pid=os.getpid())


def _run_ray(config: RunConfig, run: RunDirectory, progress: RoundProgress) -> None:
    with ExitStack() as stack:
        # Short, because Ray puts Unix sockets below it and their paths may have 107 characters.
        folder = Path(tempfile.mkdtemp(prefix="fe-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        log = stack.enter_context((run.path / "superlink.log").open("ab"))
        mark = uuid.uuid4().hex
        environment = own_environment(folder, mark, config.ray_address)
        if may_share_gpu(config):
            others = 2  # the server, which tests, and the generator
            on_gpu = clients_at_once(config, on_gpu=True) + others
            environment |= stack.enter_context(shared_gpu(folder, environment, on_gpu))
        superlink, processes = start_superlink(environment, folder, log, mark, stack, run)
        run_id = _submit(stage_app(config, folder / "fedeas"), config, environment, folder)

        def finished_by_flower() -> str:
            found = run_flwr_json(["list", "own", "--run-id", run_id], environment, folder).get("runs") or [{}]
            status = str(found[0].get("status", ""))
            return status if status.startswith("finished") else ""

        _follow(superlink, processes, finished_by_flower, run, progress)


def _submit(app: Path, config: RunConfig, environment: dict[str, str], folder: Path) -> str:
    resources = ray_resources(config, pick_device(config.device) == "cuda")
    federation = {"num-supernodes": config.clients, **resources}
    words = " ".join(f"{key}={value}" for key, value in federation.items())
    answer = run_flwr_json(["run", str(app), "own", "--federation-config", words], environment, folder)
    if not answer.get("run-id"):
        raise RunFailedError(f"Flower did not start the run: {answer.get('error-message', answer)}")
    return str(answer["run-id"])


def _follow(
    superlink: subprocess.Popen[bytes],
    processes: ProcessTree,
    finished_by_flower: Callable[[], str],
    run: RunDirectory,
    progress: RoundProgress,
) -> None:
    """Wait until the run has ended by its own word, or died without one."""
    heard = time.monotonic()
    while True:
        time.sleep(0.2)
        processes.note()
        if progress.update():
            heard = time.monotonic()
        # In this order: a ServerApp writes how the run ended, and ends then.
        servers = [process for process in run.registered_processes() if process["pid"] != os.getpid()]
        gone = bool(servers) and not any(map(is_alive, servers))
        if run.status()[0] in ("finished", "failed"):
            return
        if superlink.poll() is not None:
            died = f"Flower's SuperLink ended with code {superlink.returncode}; see {run.path}/superlink.log"
            raise ProcessesDiedError(died)
        if gone:
            raise ProcessesDiedError("the server's process died without a word")
        if time.monotonic() - heard > 20:  # asking costs seconds of CPU, so only when nothing has been heard
            ended = finished_by_flower()
            if ended and run.status()[0] not in ("finished", "failed"):
                raise ProcessesDiedError(f"Flower ended the run as '{ended}'; see {run.path}/*.log")
            heard = time.monotonic()
