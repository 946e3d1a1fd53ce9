"""Start a run, show its progress, determine how it ended, and leave no process behind.

`flwr run` of Flower 1.41 always returns success, finds a SuperLink by its port, and leaves one running. So a Ray run
starts its own SuperLink as a child process, with its own port, home and Ray folder; the launcher reads the run's status
from the run directory and at the end kills every process that the run started.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from fedeas_flwr.callbacks.registry import open_callbacks
from fedeas_flwr.common.devices import pick_device
from fedeas_flwr.common.errors import ProcessesDiedError, RunFailedError
from fedeas_flwr.common.processes import ProcessTree, is_alive
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.common.text import MAX_LINE, one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.generators.federated import federated_training
from fedeas_flwr.launch.mps import may_share_gpu, shared_gpu
from fedeas_flwr.launch.namespace import inside, is_permitted
from fedeas_flwr.launch.progress import GenerationProgress, RoundProgress, rounds_done
from fedeas_flwr.launch.resources import clients_at_once, ray_resources
from fedeas_flwr.launch.superlink import own_environment, run_flwr_json, stage_app, start_superlink
from fedeas_flwr.launch.watchdog import launch_folder
from fedeas_flwr.runs.directory import RunDirectory

SHARE_NETWORK = "FEDEAS_SHARE_NETWORK"
"""Environment variable that lets the processes of a Ray run use this machine's network, as custom models may need."""


def launch(config: RunConfig, console: Console) -> RunDirectory:
    """Run ``config`` to its end on its backend and return the run directory.

    Raise `RunError`, whose message is one line, if the run could not start, and `RunFailedError` if it did not finish.
    After a `KeyboardInterrupt` it can be resumed.
    """
    # Write the folder, its config and a new status before anything slow starts: a rejection is immediate, an old status
    # is not mistaken for this run's, and a run stopped by Ctrl-C can always be resumed.
    environment = describe_environment("not known yet")  # slow, so it comes before the check in the next line
    RunDirectory(Path(config.run_dir)).refuse_if_it_runs()
    run = RunDirectory.start(config, environment)
    run.set_status("running", pid=os.getpid())  # start-up is counted from here, also in a sweep
    before = len(run.rounds())
    images = GenerationProgress(config) if config.generates else None
    training = federated_training(config) if config.trains_generator else None
    with RoundProgress(run, config.rounds, before, console, images, training) as progress:
        try:
            if config.backend == "inline":
                _run_inline(config, run, progress)
            else:
                _run_ray_with_restarts(config, run, progress, console)
        except KeyboardInterrupt:
            run.set_status("interrupted")
            raise
        except Exception as failure:
            if run.status()[0] == "running":  # the ServerApp did not start, or could not write its status
                with suppress(OSError):
                    run.set_status("failed", one_line(failure, MAX_LINE))
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
        except SystemExit as error:  # its code may be 0 although the run is not finished
            raise RunFailedError(f"the run was interrupted: code in it exited with {error.code}") from error
        except Exception as error:
            if run.status()[0] not in ("failed", "unknown"):
                raise
            raise RunFailedError(run.status()[1] or str(error)) from error
        finally:
            grid.close()


@contextmanager
def _quiet_terminal() -> Iterator[None]:
    """Remove the handlers of Flower's log during the block; the ServerApp writes the log to the run directory."""
    logger = logging.getLogger("flwr")
    before = list(logger.handlers)
    logger.handlers = []
    try:
        yield
    finally:
        logger.handlers = before


# -------------------------------------------------------------------------------------------------- ray


def _run_ray_with_restarts(config: RunConfig, run: RunDirectory, progress: RoundProgress, console: Console) -> None:
    """Run, and after a process died resume from the checkpoint with new processes.

    Flower's pool never replaces a client process that died, and the remaining ones may be too few. At most `restarts`
    consecutive restarts without a new round are allowed; a run that completes rounds between deaths continues.
    """
    failed_restarts, training = 0, federated_training(config) if config.trains_generator else None
    reachable_because = _why_reachable(config)
    if reachable_because:
        note = f"note: Flower's control port is open to all users of this machine, since {reachable_because}"
        console.print(note, highlight=False, soft_wrap=True)
    while True:
        done = len(run.rounds()) + rounds_done(training)
        try:
            _run_ray(config, run, progress, isolated=not reachable_because)
            reason = run.status()[1] if run.has_died() else ""
        except ProcessesDiedError as error:
            reason = str(error)
        if not reason:
            return
        failed_restarts = 0 if len(run.rounds()) + rounds_done(training) > done else failed_restarts + 1
        if failed_restarts > config.restarts:
            run.set_status("failed", reason, died=True)
            return
        console.print(f"processes died ({reason}); resuming from the last checkpoint", highlight=False, soft_wrap=True)
        config = config.with_changes(resume=True)
        run.set_status("running", pid=os.getpid())


def _why_reachable(config: RunConfig) -> str:
    """Return why the run cannot have its own network namespace, or an empty string if it can."""
    if config.ray_address:
        cluster = (
            "a cluster's Ray is open to all who reach it unless its machines and this one have the same RAY_AUTH_TOKEN"
        )
        return "ray-address needs the network" + ("" if os.environ.get("RAY_AUTH_MODE") == "token" else f"; {cluster}")
    if os.environ.get(SHARE_NETWORK):
        return f"{SHARE_NETWORK} is set"
    if callbacks := open_callbacks(config.callbacks).need_network:
        return f"callbacks need the network ({', '.join(callbacks)})"
    return "" if is_permitted() else "this system permits no network namespace"


def _run_ray(config: RunConfig, run: RunDirectory, progress: RoundProgress, isolated: bool) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(launch_folder())
        environment = own_environment(folder, config.ray_address)
        if isolated:
            environment["FEDEAS_OFFLINE"] = "1"  # `prepare` has downloaded what the run needs
        if may_share_gpu(config):
            others = 2  # the server, which evaluates, and the generator
            on_gpu = clients_at_once(config, on_gpu=True) + others
            environment |= stack.enter_context(shared_gpu(folder, environment, on_gpu))
        resources = ray_resources(config, pick_device(config.device) == "cuda")
        superlink, processes = start_superlink(
            environment, folder, stack, run, isolated, None if config.ray_address else resources
        )
        within = inside(superlink.pid) if isolated else []
        federation = {"num-supernodes": config.clients, **resources}
        # Ray runs already, so its own size is not for Flower.
        sizes = " ".join(f"{key}={value}" for key, value in federation.items() if not key.startswith("init-args"))
        words = ["run", str(stage_app(config, folder / "fedeas")), "own", "--federation-config", sizes]
        started = run_flwr_json(words, environment, folder, within)
        if not (run_id := started.get("run-id")):
            raise RunFailedError(f"Flower did not start the run: {started.get('error-message', started)}")

        def finished_by_flower() -> str:
            answer = run_flwr_json(["list", "own", "--run-id", str(run_id)], environment, folder, within)
            found = answer.get("runs") or [{}]
            status = str(found[0].get("status", ""))
            return status if status.startswith("finished") else ""

        _follow(superlink, processes, finished_by_flower, run, progress)


def _follow(
    superlink: subprocess.Popen[bytes],
    processes: ProcessTree,
    finished_by_flower: Callable[[], str],
    run: RunDirectory,
    progress: RoundProgress,
) -> None:
    """Wait until the run has recorded that it finished or failed; raise `ProcessesDiedError` if it died before."""
    last_progress = time.monotonic()
    while True:
        time.sleep(0.2)
        processes.note()
        if progress.update():
            last_progress = time.monotonic()
        # Look for processes before the status: a ServerApp writes the final status and then exits.
        servers = [process for process in run.registered_processes() if process["pid"] != os.getpid()]
        gone = bool(servers) and not any(map(is_alive, servers))
        if run.status()[0] in ("finished", "failed"):
            return
        if superlink.poll() is not None:
            died = f"Flower's SuperLink ended with code {superlink.returncode}; see {run.path}/superlink.log"
            raise ProcessesDiedError(died)
        if gone:
            raise ProcessesDiedError("the ServerApp process died without reporting a status")
        # The query takes seconds of CPU time, and usually the simulation's process ends with the run.
        quiet = time.monotonic() - last_progress
        if quiet > 120 or (quiet > 20 and not processes.runs("flwr-simulation")):
            ended = finished_by_flower()
            if ended and run.status()[0] not in ("finished", "failed"):
                raise ProcessesDiedError(f"Flower ended the run as '{ended}'; see {run.path}/*.log")
            last_progress = time.monotonic()
