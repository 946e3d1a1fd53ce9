"""A run's ports are reached by nobody else: another user of this machine tries them and gets nothing."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from runners import small, start_interruptible
from waiting import LONG, PausedRun, wait_until

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.launch.namespace import inside, is_permitted, listens_inside
from fedeas_flwr.launch.run import SHARE_NETWORK, launch
from fedeas_flwr.launch.superlink import free_port, is_listening, own_environment
from fedeas_flwr.runs.directory import RunDirectory

pytestmark = pytest.mark.flower

LISTENER = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    print("ready", flush=True)
    time.sleep(600)
"""

BECOME = """
import ctypes, encodings.idna, errno, http.client, os, socket, sys
from pathlib import Path
from fedeas_flwr.launch import namespace
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # /proc/self is the user's again, as after a login
"""

CONNECT = """
for port in sys.argv[1:]:
    with socket.socket() as s:
        print(errno.errorcode.get(s.connect_ex(("127.0.0.1", int(port))), "connected"))
"""

LIST_RUNS = """
try:
    control = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    control.request("POST", "/v1/control/list-runs", b"", {"Content-Type": "application/protobuf"})
    print(control.getresponse().status)
except OSError as error:
    print(errno.errorcode[error.errno])
"""


def as_another_user(code: str, *words: object) -> list[str]:
    """Run Python code as the user 65534, "nobody", and return the words it printed."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    done = subprocess.run([sys.executable, "-c", BECOME + code, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def must_be_permitted() -> None:
    if not is_permitted():
        pytest.skip("this system permits no network namespace")


@pytest.fixture
def listener() -> Iterator[tuple[int, int]]:
    """Listen in a namespace of its own; yield the process and the port."""
    must_be_permitted()
    port = free_port()
    command = [*inside(), sys.executable, "-S", "-c", LISTENER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield process.pid, port
        process.kill()


def test_namespace_ports_are_closed_to_all_but_those_who_join(listener: tuple[int, int]) -> None:
    pid, port = listener
    assert listens_inside(pid, port) and not listens_inside(pid, port + 1) and not is_listening(port)
    with socket.create_server(("127.0.0.1", 0)) as outside:  # this process has no namespace of its own
        assert not listens_inside(os.getpid(), outside.getsockname()[1])
    connect = [sys.executable, "-c", f"import errno, socket, sys\n{CONNECT}", str(port)]
    assert subprocess.check_output(connect, text=True) == "ECONNREFUSED\n"
    assert subprocess.check_output([*inside(pid), *connect], text=True) == "connected\n"


def test_another_user_can_neither_connect_nor_join(listener: tuple[int, int]) -> None:
    pid, port = listener
    assert as_another_user(CONNECT, port) == ["ECONNREFUSED"]
    join = "try: namespace._join(sys.argv[1])\nexcept OSError as error: print(errno.errorcode[error.errno])"
    assert as_another_user(join, pid) == ["EACCES"]


def test_ordinary_users_files_keep_their_owner(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o777)
    code = """
try:
    namespace._create()
except OSError:
    sys.exit(print("forbidden"))
with socket.create_server(("127.0.0.1", 0)) as here, socket.create_connection(here.getsockname()):
    Path(sys.argv[1]).touch()
    print(len(socket.if_nameindex()), os.getuid(), os.getgid())
"""
    said = as_another_user(code, tmp_path / "file")
    if said == ["forbidden"]:
        pytest.skip("this system permits ordinary users no namespace")
    assert said == ["1", "65534", "65534"]
    assert (tmp_path / "file").stat().st_uid == (tmp_path / "file").stat().st_gid == 65534


def test_system_without_namespaces_is_recognised() -> None:
    must_be_permitted()
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare")
    code = "from fedeas_flwr.launch.namespace import is_permitted; print(is_permitted())"
    forbid = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "-", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"namespaces cannot be forbidden here: {done.stderr.strip()[:120]}")
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("keys", "variables", "permitted", "line"),
    [
        ({}, {}, True, ""),
        ({}, {}, False, "this system permits no network namespace"),
        ({}, {SHARE_NETWORK: "1"}, True, f"{SHARE_NETWORK} is set"),
        ({"callbacks": "metrics(port=0), early-stop(target=1)"}, {}, True, "callbacks need the network (metrics)\n"),
        ({"callbacks": "early-stop(target=1)"}, {}, True, ""),
        ({"ray_address": "10.0.0.2:6379"}, {}, True, "the same RAY_AUTH_TOKEN"),
        ({"ray_address": "10.0.0.2:6379"}, {"RAY_AUTH_MODE": "token"}, True, "ray-address needs the network\n"),
    ],
)
def test_open_control_port_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, str],
    variables: dict[str, str],
    permitted: bool,
    line: str,
) -> None:
    isolations: list[bool] = []

    def run_ray(config: Any, run: RunDirectory, progress: Any, isolated: bool) -> None:
        isolations.append(isolated)
        run.set_status("failed", "enough seen")

    for name, value in {SHARE_NETWORK: "", "RAY_AUTH_MODE": "", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("fedeas_flwr.launch.run.is_permitted", lambda: permitted)
    monkeypatch.setattr("fedeas_flwr.launch.run._run_ray", run_ray)
    shown = io.StringIO()
    with pytest.raises(RunError, match="enough seen"):
        launch(small(tmp_path / "r", backend="ray", **keys), Console(file=shown, width=60))
    lines = [one for one in shown.getvalue().splitlines(keepends=True) if "control port" in one]
    assert isolations == [not line] and len(lines) == bool(line) and line in "".join(lines)


def test_each_run_has_its_own_ray_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the cluster's")
    for name in "abc":
        (tmp_path / name).mkdir()
    one, other = (own_environment(tmp_path / name) for name in "ab")
    assert one["RAY_AUTH_MODE"] == "token" and len(bytes.fromhex(one["RAY_AUTH_TOKEN"])) == 32
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    assert own_environment(tmp_path / "c", "10.0.0.2:6379")["RAY_AUTH_TOKEN"] == "the cluster's"


# ------------------------------------------------------------------------------------------- for real, under Ray

JOIN_RAY = "import ray, sys; ray.init(address=sys.argv[1])"


@pytest.mark.slow
@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.parametrize("shared", [False, True])
def test_another_user_gets_nothing_from_a_ray_run(tmp_path: Path, shared: bool) -> None:
    """Without a namespace the control port answers, as the run says; Ray wants its token all the same."""
    must_be_permitted()
    folder, conf, paused = tmp_path / "run", tmp_path / "conf.toml", PausedRun(tmp_path, 1)
    conf.write_text('clients = 4\nalpha = 0.1\nrounds = 2\nlocal-epochs = 1\npolicy = "none"\n')
    command = [sys.executable, "-m", "fedeas_flwr", "run", str(conf), f"run-dir={folder}"]
    environment = paused.environment | {"FEDEAS_OFFLINE": "", SHARE_NETWORK: "1" if shared else ""}
    with start_interruptible(command, env=environment) as child:
        wait_until(lambda: RunDirectory(folder).rounds() or child.poll() is not None, "a round is done")
        started = psutil.Process(child.pid).children(recursive=True)
        superlink = next(process for process in started if process.name().startswith("flower-superlin"))
        raylet = next(process for process in started if process.name() == "raylet")
        table = Path(f"/proc/{superlink.pid}/net/tcp").read_text() + Path(f"/proc/{superlink.pid}/net/tcp6").read_text()
        listening = [line.split() for line in table.splitlines() if line.split()[3] == "0A"]
        ports = {int(fields[1].rpartition(":")[2], 16) for fields in listening}
        control = int(superlink.cmdline()[-1])
        (address,) = (word.rpartition("=")[2] for word in raylet.cmdline() if word.startswith("--gcs-address="))
        assert control in ports and len(ports) >= 6
        assert (superlink.environ()["FEDEAS_OFFLINE"] == "1") != shared
        if not shared:
            assert as_another_user(CONNECT, *ports) == ["ECONNREFUSED"] * len(ports)
        assert as_another_user(LIST_RUNS, control) == (["200"] if shared else ["ECONNREFUSED"])
        if shared:
            on_loopback = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
            stranger = [sys.executable, "-c", JOIN_RAY, address]
            refused = subprocess.run(stranger, env=on_loopback, capture_output=True, text=True, timeout=LONG)
            assert refused.returncode and "InvalidAuthToken" in refused.stderr
        paused.release()
        out, errors = child.communicate(timeout=LONG)
    assert child.returncode == 0, errors
    assert ("control port" in out) == shared
