"""A seeded campaign of faults: kills, damaged files and wrong values, and how each of them ended.

    make chaos MINUTES=10 SEED=7         trials of all kinds in turn, for ten minutes
    make chaos SEED=7 ONLY=files:17      one trial again

A trial runs `fedeas` on copies of a run directory and a cache, causes one fault, and does what a user would: resume.
Then it compares the final weights, the rounds and the summary with those of an undisturbed run, and looks for processes
that are left. Kind and number of a trial determine, with the seed, everything but the machine's timing.

Outcomes:

survived      same result after a kill and a resume, or after a refusal and the resume that its line names
harmless      same result at once: the file was read from its source again, or the kill came too late
refused       one line on stderr and an exit code that is not 0
silent        exit code 0 with another result, or a wrong value that was accepted as something else
traceback     a traceback, several lines, a crash, or an exit code without a line
left running  a process that is still there afterwards, or a command that did not end in time
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from deployments import Lab
from injections import damage, means, wrong_value

from fedeas_flwr.commands import app
from fedeas_flwr.common.processes import with_variable
from fedeas_flwr.common.randomness import Noise
from fedeas_flwr.launch.watchdog import is_watchdog
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]
WANTED = {"inline": 40, "ray": 15, "nodes": 10, "files": 200, "values": 200}
"""Number of trials of each kind in a whole campaign."""
OUTCOMES = ("survived", "harmless", "refused", "silent", "traceback", "left running")
BAD = ("silent", "traceback", "left running")
MARKER = "FEDEAS_CAMPAIGN"
"""Environment variable that the processes of a trial inherit."""
LIMIT, GRACE = 300.0, 30.0
"""Seconds that a command may take, and that processes may take to end after it."""

COMMON = {
    "clients": 4,
    "alpha": 0.1,
    "rounds": 6,
    "local-epochs": 1,
    "participation": 1.0,
    "checkpoint-every": 2,
    "backend": "inline",
    "model": "users_models:tiny",
    "policy": "none",
}
SETUPS: dict[str, dict[str, Any]] = {
    "scaffold": {"strategy": "scaffold"},
    "dp": {"strategy": "fedavgm", "dp": "server-adaptive", "dp-noise-multiplier": 0.1},
    "images": {"policy": "fedeas", "beta": 4.0, "sampler-steps": 2, "generation-batch": 16},
    "long": {"strategy": "scaffold", "local-epochs": 10},
    "nodes": {"strategy": "scaffold", "local-epochs": 10, "clients": 2},
}
"""Runs that are disturbed: with arrays that clients keep, with secret noise, with generated images, with longer rounds,
and with two nodes."""

PLACES: dict[str, tuple[str, str]] = {
    "checkpoint": ("scaffold", "run/checkpoint.safetensors"),
    "previous checkpoint": ("scaffold", "run/checkpoint-previous.safetensors"),
    "client state": ("scaffold", "run/clients/*/state-000004.safetensors"),
    "client plan": ("images", "run/clients/*/state-000004.safetensors"),
    "config": ("scaffold", "run/config.json"),
    "identity": ("scaffold", "run/identity"),
    "rounds": ("scaffold", "run/rounds.jsonl"),
    "noise key": ("dp", "run/noise-key"),
    "dataset": ("scaffold", "cache/data/*/*.npy"),
    "about dataset": ("scaffold", "cache/data/*/about.json"),
    "partition": ("scaffold", "cache/partitions/*.npz"),
    "image shard": ("images", "cache/images/*/*/*/*.npy"),
    "generator": ("images", "generator/*/*.*"),
}
"""Files that a resume opens: the setup, and where they are. The generator is opened because its images are missing."""


@dataclass
class Result:
    """How one trial ended; the fields of a line of trials.jsonl."""

    trial: str
    place: str
    how: str
    outcome: str
    said: str
    seconds: float = 0.0


class TimeLimitError(Exception):
    """A command or a wait took longer than its limit."""


# -------------------------------------------------------------------------------------------------- processes

forks = multiprocessing.get_context("forkserver")


def enter(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run the command in a new process, which has imported everything; its stderr goes to a file."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.environ.update(environment)
    (folder / "cwd" / "inner").mkdir(parents=True, exist_ok=True)
    os.chdir(folder / "cwd" / "inner")
    sys.argv = ["fedeas", *words]
    app.main()


class Processes:
    """The processes of one trial: those with its marker, and their descendants while their parents lived.

    Ray's processes overwrite their environment with a title, so the marker alone does not find them.
    """

    def __init__(self, value: str) -> None:
        self.value, self._known = value, set[psutil.Process]()

    def note(self, pid: int) -> None:
        """Remember a process and the present descendants of all known ones."""
        with suppress(psutil.Error):
            self._known.add(psutil.Process(pid))
        for process in list(self._known):
            with suppress(psutil.Error):
                self._known.update(process.children(recursive=True))

    def alive(self) -> list[psutil.Process]:
        self._known.update(with_variable(MARKER, self.value))
        return [process for process in self._known if _is_alive(process)]

    def wait_for_end(self, seconds: float) -> list[psutil.Process]:
        """Wait until none is alive; return those that still are."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to all of them at the same moment."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


# ------------------------------------------------------------------------------------------------------ trials


class Campaign:
    """Runs trials in one work folder, one after the other.

    All trials use the same path, since a run's config names the path of its generator.

    Parameters
    ----------
    seed
        Of every draw.
    work
        A folder for everything that the trials write.
    """

    enter = staticmethod(enter)
    """What a process of a trial executes."""

    def __init__(self, seed: int, work: Path) -> None:
        self.seed, self.work, self.folder = seed, work, work / "trial"
        names = ["fedeas_flwr.commands.app", "fedeas_flwr.launch.prepare", "fedeas_flwr.launch.run"]
        forks.set_forkserver_preload([*names, "fedeas_flwr.server_app", "fedeas_flwr.client_app", "campaign"])
        self.undisturbed = cache(self._undisturbed)

    def run(self, kind: str, number: int) -> Result:
        """Run one trial, end what it left running, and return how it ended."""
        name, began = f"{kind}:{number}", time.monotonic()
        self.draws, self.number = random.Random(f"{self.seed}/{name}"), number
        self.processes = Processes(f"{os.getpid()}-{self.seed}-{name}")
        result = Result(name, "", "", "left running", "")
        try:
            KINDS[kind](self, result)
        except KeyboardInterrupt:
            kill(self.processes.alive())
            raise
        except TimeLimitError as error:
            result.said = str(error)
        except Exception as error:
            result.outcome, result.said = "traceback", f"in the campaign: {type(error).__name__}: {error}"
        if left := self.processes.wait_for_end(0 if result.outcome == "left running" else GRACE):
            names = [
                " ".join(Path(word).name for word in process.cmdline())[:100] for process in left if _is_alive(process)
            ]
            result.outcome, result.said = "left running", f"{result.said} left: {names}".strip()
            kill(left)
        result.said = result.said.replace(str(self.work), "WORK")[:300]
        result.seconds = round(time.monotonic() - began, 1)
        return result

    def start(self, *words: str) -> Any:
        """Start a `fedeas` command on the trial's cache."""
        environment = {
            "FEDEAS_CACHE": str(self.folder / "cache"),
            "FEDEAS_OFFLINE": "1",
            MARKER: self.processes.value,
        }
        process = forks.Process(target=self.enter, args=(list(words), self.folder, environment))
        process.start()
        return process

    def wait(self, process: Any, until: Callable[[], object] = lambda: False) -> bool:
        """Wait until something is true or the process has ended; return whether it became true first."""
        deadline, noted = time.monotonic() + LIMIT, 0.0
        while not until():
            if time.monotonic() > noted + 0.5:  # it reads all processes of the machine
                self.processes.note(process.pid)
                noted = time.monotonic()
            process.join(0.02)
            if process.exitcode is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeLimitError(f"it did not end within {LIMIT:g} s")
        return True

    def command(self, *words: str, setup: str) -> tuple[str, str]:
        """Run a `fedeas` command to its end; return same, silent, refused or traceback, and what it said."""
        process = self.start(*words)
        self.wait(process)
        return self.judge(process.exitcode, setup)

    def judge(self, code: int, setup: str) -> tuple[str, str]:
        """Return how a command ended, and its last line on stderr."""
        said = (self.folder / "stderr").read_text(errors="replace").strip()
        lines = said.split("\n")
        if code == 0:
            return self.compare(self.folder / "run", setup), lines[-1]
        in_one_line = code in (1, 2) and len(lines) == 1 and said.startswith("error: ")
        return "refused" if in_one_line else "traceback", f"{lines[-1]} (exit code {code})"

    def compare(self, run: Path, setup: str) -> str:
        """Return same or silent: whether a run's result is that of the undisturbed run."""
        expected = outcome_of(self.undisturbed(setup) / "run")
        with suppress(OSError, ValueError):  # a file that is missing or damaged
            return "same" if outcome_of(run) == expected else "silent"
        return "silent"

    def _undisturbed(self, setup: str) -> Path:
        """Do a whole run of a setup, and one of four rounds; return the folder of both and their caches."""
        folder = self.work / setup
        for name, rounds in (("half", 4), ("whole", COMMON["rounds"])):
            self.prepare(setup)
            process = self.start("run", str(self.folder / "run.toml"), f"rounds={rounds}")
            self.wait(process)
            assert process.exitcode == 0, (self.folder / "stderr").read_text()
            self.folder.rename(folder if name == "whole" else self.work / f"{setup}-half")
        return folder

    def prepare(self, setup: str) -> None:
        """Write the trial's folder for a new run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        keys = {**COMMON, **SETUPS[setup], "run-dir": str(self.folder / "run")}
        if keys["policy"] == "fedeas":
            shutil.copytree(builtin_generator(), self.folder / "generator", copy_function=shutil.copyfile)
            keys["generator"] = str(self.folder / "generator")
        if "dp" in keys:
            (self.folder / "run").mkdir()
            Noise(self.work / "noise-key")  # written once, so that all runs have the same noise
            shutil.copy(self.work / "noise-key", self.folder / "run")
        (self.folder / "run.toml").write_text(tomli_w.dumps(keys))

    def copy_half(self, setup: str) -> None:
        """Copy the run of four rounds and its cache into the trial's folder."""
        self.undisturbed(setup)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.work / f"{setup}-half", self.folder)


def outcome_of(run: Path) -> Any:
    """Return a run's model, rounds and summary without times; its images may have been made by an earlier attempt."""
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    kept = [{key: record[key] for key in sorted(record.keys() - {"seconds", "made", "digest"})} for record in rounds]
    return (run / "model.safetensors").read_bytes(), kept, {k: v for k, v in summary.items() if "seconds" not in k}


@cache
def builtin_generator() -> Path:
    """Return the folder of the digits generator, which trains once for about a minute."""
    from fedeas_flwr.generators.learn.builtin import ensure_builtin

    return ensure_builtin()


def rounds_done(run: Path) -> int:
    with suppress(OSError):
        return (run / "rounds.jsonl").read_bytes().count(b"\n")
    return 0


# ------------------------------------------------------------------------------------------------------- kills


def kill_inline(campaign: Campaign, result: Result) -> None:
    """Kill an inline run one to three times at random moments, and resume it each time."""
    draws, run = campaign.draws, campaign.folder / "run"
    setup = ("scaffold", "dp", "images")[campaign.number % 3]
    campaign.undisturbed(setup)
    campaign.prepare(setup)
    result.place, moments, late = f"launcher, {setup}", list[str](), 0
    words = ["run", str(campaign.folder / "run.toml")]
    for _ in range(draws.choice([1, 1, 2, 3])):
        after, pause = draws.randrange(COMMON["rounds"]), draws.choice([0.05, 0.2, 1.0]) * draws.random()
        process = campaign.start(*words)
        campaign.wait(process, lambda after=after: rounds_done(run) >= after)
        time.sleep(pause)
        process.kill()
        process.join()
        late += process.exitcode != -signal.SIGKILL
        moments.append(f"after round {rounds_done(run)} and {pause:.3f} s")
        if (run / "config.json").exists():
            words = ["resume", str(run)]
    result.how = "; ".join(moments)
    found, result.said = campaign.command(*words, setup=setup)
    result.outcome = {"same": "harmless" if late == len(moments) else "survived"}.get(found, found)


TARGETS = ("launcher", "server", "SuperLink", "raylet", "client", "launcher and watchdog")


def kill_under_ray(campaign: Campaign, result: Result) -> None:
    """Kill a process of a run under Ray at a random moment; resume unless the launcher does so itself."""
    draws, run = campaign.draws, campaign.folder / "run"
    setup = draws.choice(["long", "images"])
    campaign.undisturbed(setup)
    campaign.prepare(setup)
    result.place = f"{TARGETS[campaign.number % len(TARGETS)]}, {setup}"
    after, pause = draws.randrange(COMMON["rounds"] - 1), draws.random()
    launcher = campaign.start("run", str(campaign.folder / "run.toml"), "backend=ray", "actors=2")

    found = list[psutil.Process]()

    def there() -> bool:
        found[:] = [p for p in campaign.processes.alive() if _is_target(p, result.place, launcher.pid, run)]
        return len(found) >= 1 + ("watchdog" in result.place)

    campaign.wait(launcher, there)
    campaign.wait(launcher, lambda: rounds_done(run) >= after)
    time.sleep(pause)
    kill(found)
    result.how = f"after round {rounds_done(run)} and {pause:.3f} s: {len(found)} killed"
    campaign.wait(launcher)
    said = (campaign.folder / "stderr").read_text(errors="replace")
    result.outcome, result.said = campaign.judge(launcher.exitcode, setup)
    if launcher.exitcode == -signal.SIGKILL and "Traceback" not in said:
        if "watchdog" not in result.place:
            campaign.processes.wait_for_end(GRACE)
        result.outcome = "refused"
    deadline = time.monotonic() + LIMIT
    while result.outcome == "refused" and time.monotonic() < deadline:
        began = (run / "config.json").exists()
        words = ["resume", str(run)] if began else ["run", str(campaign.folder / "run.toml"), "backend=ray"]
        result.outcome, result.said = campaign.command(*words, setup=setup)
        if result.outcome == "refused" and "is still running" not in result.said:
            break
    if result.outcome == "same":
        result.outcome = "survived" if found else "harmless"


def _is_target(process: psutil.Process, place: str, launcher: int, run: Path) -> bool:
    """Return whether a process of the trial is one that is to be killed."""
    try:
        words, name = process.cmdline(), process.name()
    except psutil.Error:
        return False
    target = place.partition(",")[0]
    if target == "server":
        servers = {one["pid"] for one in RunDirectory(run).registered_processes()} - {launcher}
        return process.pid in servers
    if target.startswith("launcher") and process.pid == launcher:
        return True
    return {
        "SuperLink": any("flower-superlink" in word for word in words),
        "raylet": name == "raylet",
        "client": words[:1] != [] and words[0].startswith("ray::ClientAppActor"),
        "launcher and watchdog": is_watchdog(process),
    }.get(target, False)


def kill_on_nodes(campaign: Campaign, result: Result) -> None:
    """Kill a node, the SuperLink or the server of a deployment, start it again as systemd does, and resume the run."""
    draws = campaign.draws
    result.place = ("node", "SuperLink", "server")[campaign.number % 3]
    campaign.undisturbed("nodes")
    shutil.rmtree(campaign.folder, ignore_errors=True)
    campaign.folder.mkdir()
    # A round without the killed node's reply fails and is resumed: otherwise other weights would be legitimate.
    values = {**COMMON, **SETUPS["nodes"], "round-timeout": 240.0, "min-replies": 1.0}
    keys = {key.replace("-", "_"): value for key, value in values.items()}
    after, pause = draws.randrange(COMMON["rounds"] - 1), draws.random()
    with _environment({MARKER: campaign.processes.value}), Lab(campaign.folder, 2, campaign.folder) as lab:
        lab.register()
        nodes = [lab.start_node(number) for number in range(2)]
        _wait(lambda: lab.online() == 2)
        run = lab.submit(**keys)
        _wait(lambda: rounds_done(run.path) >= after and run.registered_processes())
        time.sleep(pause)
        if result.place == "server":
            victims = [psutil.Process(one["pid"]) for one in run.processes()]
        else:
            root = psutil.Process((nodes[1] if result.place == "node" else lab._superlink).pid)
            victims = [root, *root.children(recursive=True)]
        kill(victims)
        result.how = f"after round {rounds_done(run.path)} and {pause:.3f} s: {len(victims)} killed"
        if result.place == "SuperLink":
            psutil.wait_procs(victims, timeout=GRACE)
            lab._start_superlink()

        def ended() -> bool:
            for number, node in enumerate(nodes):  # Flower refuses a dead node's key for a minute
                if node.poll() is not None:
                    nodes[number] = lab.start_node(number)
            return run.state() in ("finished", "failed", "interrupted")

        for _ in range(5):
            _wait(ended)
            if run.state() == "finished":
                break
            _wait(lambda: ended() and lab.online() == 2)
            lab.submit(**{**keys, "run_dir": str(run.path), "resume": True})
            _wait(lambda: (run.status()[0] == "running" and run.processes()) or run.state() == "finished")
        result.said = run.status()[1]
        if run.state() == "finished":
            result.outcome = "survived" if campaign.compare(run.path, "nodes") == "same" else "silent"
        else:
            result.outcome = "refused"


def _wait(until: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not until():
        if time.monotonic() > deadline:
            raise TimeLimitError(f"not within {LIMIT:g} s")
        time.sleep(0.1)


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    os.environ.update(more)
    try:
        yield
    finally:
        for key in more:
            del os.environ[key]


# -------------------------------------------------------------------------------------------- files and values


def damage_file(campaign: Campaign, result: Result) -> None:
    """Damage one file that a resume opens; resume, and if the error line offers it, from the checkpoint before."""
    result.place = list(PLACES)[campaign.number % len(PLACES)]
    setup, pattern = PLACES[result.place]
    campaign.copy_half(setup)
    path = campaign.draws.choice(sorted(campaign.folder.glob(pattern)))
    if result.place == "generator":
        shutil.rmtree(campaign.folder / "cache" / "images")
    result.how = f"{path.relative_to(campaign.folder)}: {damage(path, campaign.draws)}"
    words = ["resume", str(campaign.folder / "run"), f"rounds={COMMON['rounds']}"]
    if result.place == "previous checkpoint":
        words.append("--previous")
    found, result.said = campaign.command(*words, setup=setup)
    if found == "refused" and "--previous` continues" in result.said:
        found, _ = campaign.command(*words, "--previous", setup=setup)
        found = {"same": "survived"}.get(found, found)
    result.outcome = {"same": "harmless"}.get(found, found)


def give_wrong_value(campaign: Campaign, result: Result) -> None:
    """Give `run` or `resume` a wrong value; if it is accepted, the record must say the same."""
    key, value = wrong_value(campaign.draws)
    result.place = "resume" if campaign.number % 4 == 3 else "run"
    result.how = f"{key}={value!r}" if len(value) < 100 else f"{key}={value[:20]!r}… ({len(value)} characters)"
    if result.place == "resume":
        campaign.copy_half("scaffold")
        process = campaign.start("resume", str(campaign.folder / "run"), f"{key}={value}")
    else:
        campaign.prepare("scaffold")
        process = campaign.start("run", str(campaign.folder / "run.toml"), "rounds=1", f"{key}={value}")
    campaign.wait(process)
    if process.exitcode != 0:
        result.outcome, result.said = campaign.judge(process.exitcode, "scaffold")
        return
    records = [path.parent for path in sorted(campaign.folder.rglob("config.json"))]
    recorded = [json.loads((path / "config.json").read_text())["config"] for path in records]
    same = [config for config in recorded if key in config and means(value, config[key], key)]
    result.outcome, result.said = "harmless" if same else "silent", "accepted"


KINDS: dict[str, Callable[[Campaign, Result], None]] = {
    "inline": kill_inline,
    "ray": kill_under_ray,
    "nodes": kill_on_nodes,
    "files": damage_file,
    "values": give_wrong_value,
}


# ------------------------------------------------------------------------------------------------------ report


def table(results: list[Result]) -> str:
    """Return the number of trials of each kind and place by outcome, and a line for each trial that ended badly."""
    lines = [" ".join([f"{'':<32}", f"{'tried':>6}", *(f"{name:>{max(9, len(name))}}" for name in OUTCOMES)])]

    def row(name: str, some: list[Result]) -> None:
        counts = [sum(result.outcome == outcome for result in some) for outcome in OUTCOMES]
        numbers = [f"{count:>{max(9, len(name))}}" for name, count in zip(OUTCOMES, counts, strict=True)]
        lines.append(" ".join([f"{name:<32}", f"{len(some):>6}", *numbers]))

    for kind in KINDS:
        some = [result for result in results if result.trial.startswith(f"{kind}:")]
        if some:
            row(kind, some)
            for place in sorted({result.place for result in some}):
                row(f"  {place}", [result for result in some if result.place == place])
    for result in results:
        if result.outcome in BAD:
            lines.append(f"{result.trial} {result.outcome}: {result.place}, {result.how}: {result.said}")
    return "\n".join(lines)


def read_results(path: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def next_trials(kinds: list[str], done: set[str], whole: bool) -> Iterator[tuple[str, int]]:
    """Yield the trials that are not done, of all kinds in proportion to `WANTED`; without end if not ``whole``."""
    total = max(WANTED.values())
    for step in range(total) if whole else itertools.count():
        for kind in kinds:
            number = step * WANTED[kind] // total
            if (step == 0 or number != (step - 1) * WANTED[kind] // total) and f"{kind}:{number}" not in done:
                yield kind, number


def main() -> int:
    """Run a campaign and print its table; return 1 if a trial ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of every draw")
    parser.add_argument("--minutes", type=float, default=10, help="start no trial after this time")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--whole", action="store_true", help=f"end after {WANTED}")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="run one trial and write nothing")
    parser.add_argument("--out", type=Path, help="folder of trials.jsonl, which a later call continues, and table.txt")
    given = parser.parse_args()
    paths = [ROOT, ROOT / "tests" / "helpers", ROOT / "tests" / "faults"]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "FEDEAS_TEST_CACHE" in os.environ:
        os.environ["FEDEAS_CACHE"] = os.environ["FEDEAS_TEST_CACHE"]
    builtin_generator()
    results = read_results(given.out / "trials.jsonl") if given.out else []
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    trials = next_trials(given.kinds, {result.trial for result in results}, given.whole)
    if given.only:
        kind, _, number = given.only.partition(":")
        trials = iter([(kind, int(number))])
    deadline = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="chaos-") as work:
        campaign = Campaign(given.seed, Path(work))
        for kind, number in trials:
            if time.monotonic() > deadline:
                break
            result = campaign.run(kind, number)
            results.append(result)
            print(f"{result.trial} {result.outcome} ({result.seconds:g} s): {result.place}, {result.how}", flush=True)
            if result.outcome in BAD or given.only:
                print(f"    {result.said}", flush=True)
            if given.out and not given.only:
                with (given.out / "trials.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    print(table(results))
    if given.out and not given.only:
        (given.out / "table.txt").write_text(table(results) + "\n")
    return int(any(result.outcome in BAD for result in results))


if __name__ == "__main__":
    sys.exit(main())
