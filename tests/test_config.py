"""The run-config: defaults in one place, one-line errors for invalid input."""

import tomllib
from pathlib import Path

import pytest
from runners import finish, quick, run_in_process

from fedeas_flwr.commands.output import print_unused
from fedeas_flwr.commands.quickstart import quickstart_config
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import KEYS, SAMPLER_STEPS, TABLES, RunConfig, parse_config
from fedeas_flwr.config_files import parse_overrides, read_config, read_values
from fedeas_flwr.config_keys import PARTITION_KEYS, Key, identity, keys_in_use, run_keys
from fedeas_flwr.policies.registry import POLICIES

ROOT = Path(__file__).parents[1]


def test_pyproject_defaults_equal_the_configs() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    shipped |= {f"{table}.{key}": value for table in TABLES for key, value in shipped.pop(table).items()}
    defaults = parse_config({}).to_user_dict()
    assert shipped == defaults
    assert {k: type(v) for k, v in shipped.items()} == {k: type(v) for k, v in defaults.items()}


def test_policy_key_lists_every_policy() -> None:
    (policy,) = (key for key in run_keys() if key.name == "policy")
    assert policy.allowed["enum"] == list(POLICIES)


def test_every_key_is_described() -> None:
    assert all(field.description for field in RunConfig.model_fields.values())


def test_sampler_steps_describes_every_default() -> None:
    (steps,) = (key for key in run_keys() if key.name == "sampler-steps")
    assert steps.meaning.endswith(", ".join(f"{number} for {name}" for name, number in SAMPLER_STEPS.items()))


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_confs_are_valid_and_state_their_hardware(path: Path) -> None:
    read_config(path)
    head = path.read_text().split("\n\n")[0]
    assert head.startswith("#")
    assert "Hardware" in head


def test_quickstart_conf_equals_the_quickstart_fedeas_run(tmp_path: Path) -> None:
    run = quickstart_config("fedeas", "ray", tmp_path)
    assert read_config(ROOT / "conf" / "quickstart.toml") == run.with_changes(run_dir="")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"beta": -1}, ["beta", "-1", "greater than or equal to 0"]),
        ({"alpha": 0}, ["alpha", "0", "greater than 0"]),
        ({"alpha": float("nan")}, ["alpha", "nan"]),
        ({"learning-rate": float("inf")}, ["learning-rate", "inf"]),
        ({"betta": 3}, ["betta", "3", "did you mean 'beta'"]),
        ({"zzzzzz": 3}, ["unknown key 'zzzzzz' = 3; `fedeas keys` lists them all"]),
        ({"batch": 3}, ["'batch' = 3; did you mean 'min-batch' or 'batch-size'? `fedeas keys` lists them all"]),
        ({"steps": 3}, ["did you mean 'fedgen-steps' or 'sampler-steps'?"]),
        ({"lr": 0.1}, ["'lr' = 0.1; did you mean 'learning-rate'?"]),
        ({"policy": "FedEAS"}, ["policy = 'FedEAS'", "; did you mean 'fedeas'?"]),
        ({"partition": "counts10.csv"}, ["partition = 'counts10.csv'", "`fedeas plan --counts`"]),
        ({"policy": "fedeass"}, ["policy = 'fedeass'", "; did you mean 'fedeas'?"]),
        ({"strategy": "FedAvg"}, ["strategy = 'FedAvg'", "; did you mean 'fedavg'?"]),
        ({"dataset": "CIFAR10"}, ["dataset = 'CIFAR10'", "; did you mean 'cifar10'?"]),
        ({"policy": "magic"}, ["policy", "magic", "fedeas", "waterfill"]),
        ({"policy": "greedy"}, ["policy = 'greedy': must be", "label counts", "`fedeas plan`", "waterfill"]),
        ({"rounds": 0}, ["rounds", "0"]),
        ({"rounds": True}, ["rounds", "True", "number"]),
        ({"shared-images": True}, ["shared-images", "True", "'no', 'by-class' or 'one-seed'"]),
        ({"generator-training.preset": False}, ["preset", "False", "'digits'", "'paper'"]),
        ({"model": True}, ["model", "True", "string"]),
        ({"rounds": 2.5}, ["rounds", "2.5", "integer"]),
        ({"clients": "many"}, ["clients", "many", "integer"]),
        ({"printed-rule": "maybe"}, ["printed-rule", "maybe", "true or false"]),
        ({"run-dir": "here"}, ["run-dir", "here", "absolute"]),
        ({"resume": True}, ["resume", "run-dir"]),
        ({"evaluation": "federated"}, ["evaluation", "federated", "paper"]),
        ({"total": 5}, ["total", "5", "uniform"]),
        ({"min-batch": 40}, ["min-batch = 40", "at most batch-size = 32"]),
        ({"min-batch": 1}, ["min-batch", "1", "greater than or equal to 2"]),
        ({"dataset": "cifar10"}, ["generator", "builtin", "cifar10", "folder"]),
        ({"batch-size": 1}, ["batch-size", "1"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"cache-limit": "lots"}, ["cache-limit", "lots", "20GB"]),
        ({"min-class-agreement": 1.5}, ["min-class-agreement", "1.5"]),
        ({"loss": "focal"}, ["loss", "focal", "class-weighted", "logit-adjusted"]),
        ({"logit-adjustment-tau": -1}, ["logit-adjustment-tau", "-1", "greater than or equal to 0"]),
        ({"guidance": 0.5}, ["guidance", "0.5", "greater than or equal to 1"]),
        ({"views": "flip"}, ["views", "flip", "none", "flip-crop"]),
        ({"policy": "oversample", "total": 5}, ["total", "5", "oversample"]),
    ],
)
def test_invalid_values_are_rejected_in_one_line(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(values)
    text = str(refused.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_overrides_are_parsed_as_toml_if_possible() -> None:
    words = ["beta=12", "policy=none", "resume=false", "data-dir=/a b/c", 'model="m:f"', "alpha = 0.3"]
    assert parse_overrides(words) == {
        "beta": 12,
        "policy": "none",
        "resume": False,
        "data-dir": "/a b/c",
        "model": "m:f",
        "alpha": 0.3,
    }
    texts = {"run-dir": "2026-10-05", "cache-limit": "5000000000", "data-dir": "2024", "model": "true", "weights": "[]"}
    texts |= {"generator-training.start": "2024"}
    assert parse_overrides([f"{key}={text}" for key, text in texts.items()]) == texts
    assert parse_config(parse_overrides(["cache-limit=5000000000", 'data-dir="2024"'])).data_dir == "2024"
    with pytest.raises(ConfigError, match="'beta' is not key=value, such as beta=6"):
        parse_overrides(["beta"])
    with pytest.raises(ConfigError, match=r"^seed=2: seed is given twice"):
        parse_overrides(["seed=1", "beta=6", "seed=2"])


@pytest.mark.parametrize("text", ["1\nlearning-rate=9", "1\n[table]", "1\nv.x=2"])
def test_a_second_line_of_an_override_is_not_dropped(text: str) -> None:
    assert parse_overrides([f"rounds={text}"]) == {"rounds": text}
    with pytest.raises(ConfigError, match=r"rounds = '1.*: must be a valid integer"):
        parse_config(parse_overrides([f"rounds={text}"]))


@pytest.mark.parametrize("content", [b"beta = ", b"\xff\xfe", b"beta = 1\nbeta = 2", b"[table]\nbeta = 1"])
def test_invalid_files_are_rejected_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        read_config(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("content", "shown", "hint"),
    [
        ("beta = 6\r\npolicy = fedeas\r\n", "policy = fedeas", True),
        ("run-dir = /a/b\x1b[31m", "run-dir = /a/b", True),
        ("policy = 'none' 1\n", "policy = 'none' 1", False),
        ("policy = " + 1000 * "f", "policy = ffff", True),
        ("policy = 'none", "", False),
    ],
)
def test_error_in_a_file_shows_its_line(tmp_path: Path, content: str, shown: str, hint: bool) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content.encode())
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    text = str(refused.value)
    assert text.isprintable() and len(text) < 400 and shown in text and ("text needs quotes" in text) == hint


def test_config_round_trip_through_user_dict() -> None:
    config = parse_config({"policy": "uniform", "total": 7, "learning-rate": 1})
    assert parse_config(config.to_user_dict()) == config
    assert set(config.to_user_dict()) == set(KEYS)
    assert config.with_changes(beta=3.0).beta == 3.0


def test_shared_images_name_the_allowed_values() -> None:
    with pytest.raises(ConfigError, match="shared-images = 'yes': must be 'no', 'by-class' or 'one-seed'"):
        parse_config({"shared-images": "yes"})
    with pytest.raises(ConfigError, match="shared-images = 'one-seed': must be no or by-class with a bank"):
        parse_config({"shared-images": "one-seed", "generator": "bank:/b.npz"})


@pytest.mark.parametrize("value", ["t", "on", "yes", 1, "true"])
def test_disclosure_keys_accept_only_booleans(value: object) -> None:
    with pytest.raises(ConfigError, match=rf"disclose-mean-images = {value!r}: must be true or false"):
        parse_config({"disclose-mean-images": value})


def test_run_dir_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `flwr run`, whose processes start in another folder, it must be given so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    conf = Path("conf/my.toml")
    conf.write_text('run-dir = "in the file"')
    assert read_config(conf).run_dir == str(tmp_path / "conf" / "in the file")
    assert read_config(conf, ["run-dir=runs/a"]).run_dir == str(tmp_path / "runs" / "a")
    assert read_config(conf, ["run-dir="]).run_dir == ""
    assert read_config(None, ["run-dir=runs/a"]).run_dir == str(tmp_path / "runs" / "a")
    with pytest.raises(ConfigError, match="run-dir = 'runs/a': must be an absolute path"):
        parse_config({"run-dir": "runs/a"})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"generator": "../generators/x"}, "{}/generators/x"),
        ({"generator": "bank:images.npz"}, "bank:{}/conf/images.npz"),
        ({"generator": "sd-turbo:/models/turbo"}, "sd-turbo:/models/turbo"),
        ({"generator": "sd-turbo"}, "sd-turbo"),
        ({"generator": "builtin"}, "builtin"),
        ({"generator": "my.package:Name"}, "my.package:Name"),
        ({"dataset": "own:photos.npz"}, "own:{}/conf/photos.npz"),
        ({"dataset": "own:~/photos.npz"}, "own:/home/me/photos.npz"),
        ({"dataset": "cifar10"}, "cifar10"),
        ({"dataset": "mnist"}, "mnist"),
        ({"data-dir": "data"}, "{}/conf/data"),
        ({"data-dir": ""}, ""),
        ({"weights": "w.safetensors"}, "{}/conf/w.safetensors"),
        ({"weights": "imagenet"}, "imagenet"),
    ],
)
def test_paths_in_a_file_are_relative_to_its_folder(
    value: dict[str, str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    conf, ((key, text),) = Path("conf/my.toml"), value.items()
    conf.write_text(f'{key} = "{text}"')
    assert read_values(conf)[key] == found.format(tmp_path)
    assert read_values(conf, [f"{key}={text}"])[key] == text, "relative to the working directory"


@pytest.mark.parametrize(
    ("values", "generates"),
    [
        ({}, True),
        ({"policy": "none"}, False),
        ({"beta": 0}, False),
        ({"beta": 0, "policy": "full-balance"}, True),
        ({"beta": 0, "policy": "uniform", "total": 3}, True),
        ({"beta": 0, "policy": "uniform"}, False),
    ],
)
def test_generates_is_true_only_if_images_are_generated(values: dict[str, object], generates: bool) -> None:
    assert parse_config(values).generates is generates


def is_rejected(key: str, value: object) -> bool:
    """Return whether a key rejects a value, ignoring errors of other keys."""
    try:
        parse_config({key: value})
    except ConfigError as error:
        return f"{key} = {value!r}: must be" in str(error)
    return False


@pytest.mark.parametrize("key", run_keys(), ids=lambda key: key.name)
def test_keys_accept_exactly_their_documented_range(key: Key) -> None:
    step = 1 if key.allowed["type"] == "integer" else 1e-9
    for word, outwards in (("minimum", -step), ("maximum", step)):
        if key.allowed["type"] not in ("integer", "number"):
            continue
        exclusive = f"exclusive{word.capitalize()}"
        assert (word in key.allowed) != (exclusive in key.allowed), "each bound must be either inclusive or exclusive"
        bound = key.allowed.get(word, key.allowed.get(exclusive))
        taken, refused = (bound, bound + outwards * max(1, bound)) if word in key.allowed else (bound - outwards, bound)
        assert not is_rejected(key.name, taken) and is_rejected(key.name, refused)
    for choice in key.allowed.get("enum", []):
        assert not is_rejected(key.name, choice) and is_rejected(key.name, f"{choice}s")
    if key.allowed["type"] == "boolean":
        assert is_rejected(key.name, 2) and not is_rejected(key.name, True) and not is_rejected(key.name, False)


@pytest.mark.parametrize("word", ["beta=3", "gamma=0.5", "printed-rule=true"])
def test_keys_replaced_by_total_are_rejected_next_to_it(tmp_path: Path, word: str) -> None:
    """Only on the command line, where a key would be ignored; in a file it may be left from an earlier run."""
    path = tmp_path / "my.toml"
    path.write_text("clients = 4\npolicy = 'uniform'\nbeta = 9.0\n")
    assert read_config(path, ["total=5"]).total == 5
    key, _, value = word.partition("=")
    shown = {"3": "3.0", "true": "True"}.get(value, value)
    line = f"{key} = {shown}: remove the key, since total = 5 sets the number of images"
    words, out = ["total=5", word], tmp_path / "s"
    for command in (
        ["run", str(path), *words],
        ["doctor", str(path), *words],
        ["doctor", "policy=uniform", *words],
        ["sweep", str(path), *words, "--grid", "seed=1,2", "--out", str(out)],
        ["sweep", str(path), "total=5", "--grid", word, "--out", str(out)],
    ):
        done = run_in_process(*command, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n"), command
    assert list(tmp_path.iterdir()) == [path]
    assert read_config(path, [word]).total == 0


def test_allowed_values_are_shown_briefly() -> None:
    shown = {key.name: key.allowed_shown() for key in run_keys()}
    assert list(shown) == list(KEYS)
    assert shown["alpha"] == "0 < x ≤ 1,000,000"
    assert shown["fedmix-lambda"] == "0 ≤ x < 1"
    assert shown["fedgen-batch"] == "2 ≤ n ≤ 65,536"
    assert shown["loss"] == "cross-entropy, class-weighted, logit-adjusted"
    assert (shown["resume"], shown["dataset"]) == ("true, false", "text")


@pytest.mark.parametrize(
    ("keys", "change", "counts"),
    [
        ({"strategy": "qfedavg"}, {"strategy-args": "q=0.5"}, True),
        ({"strategy": "mine.algo:build"}, {"strategy-args": "rate=0.5"}, True),
        ({"strategy": "mine.algo:build"}, {"fedprox-mu": 0.5}, False),
        ({"strategy": "moon"}, {"fedprox-mu": 0.5}, False),
        ({"strategy": "fedmix", "disclose-mean-images": True}, {"fedmix-lambda": 0.5}, True),
        ({"strategy": "fedmix", "disclose-mean-images": True}, {"disclose-label-counts": True}, False),
        ({"dp": "server-fixed"}, {"dp-clip-rate": 0.5}, False),
        ({"dp": "server-adaptive"}, {"dp-clip-rate": 0.5}, True),
        ({"dp": "server-fixed"}, {"dp-clipping-norm": 0.5}, True),
        ({}, {"dp-clipping-norm": 0.5}, False),
        ({}, {"stem": "3x3"}, False),
        ({"model": "resnet18"}, {"stem": "3x3"}, True),
        ({"policy": "none"}, {"beta": 9.0, "sampler": "ddim"}, False),
        ({}, {"guidance-rescale": 0.7, "guidance-start": 0.2, "guidance-stop": 0.8}, False),
        ({"guidance": 6.0}, {"guidance-rescale": 0.7}, True),
        ({"guidance": 6.0}, {"guidance-stop": 0.7}, True),
        ({}, {"guidance": 2.0}, True),
        ({"generator": "bank:images.npz"}, {"guidance": 2.0, "sampler": "ddim", "generation-batch": 8}, False),
        ({"generator": "sd-turbo"}, {"guidance": 2.0, "sampler-steps": 4}, False),
        ({"generator": "sd-turbo"}, {"generation-batch": 8}, True),
        ({"generator": "bank:images.npz"}, {"shared-images": "by-class"}, True),
    ],
)
def test_unused_keys_do_not_change_the_keys_in_use(
    keys: dict[str, object], change: dict[str, object], counts: bool
) -> None:
    one, other = (keys_in_use(parse_config({**keys, **more})) for more in ({}, change))
    assert (one != other) is counts


@pytest.mark.parametrize(
    ("word", "key", "need"),
    [
        ("fedprox-mu=0.5", "fedprox-mu = 0.5", "strategy = 'fedprox'"),
        ("disclose-mean-images=true", "disclose-mean-images = True", "strategy = 'fedmix'"),
        ("guidance-stop=0.5", "guidance-stop = 0.5", "guidance above 1"),
        ("dp-clip-rate=0.5", "dp-clip-rate = 0.5", "dp"),
        ("policy-args=first=0.5", "policy-args = 'first=0.5'", "policy"),
        ("logit-adjustment-tau=2", "logit-adjustment-tau = 2.0", "loss = 'logit-adjusted'"),
        ("generator-training.rounds=5", "generator-training.rounds = 5", "generator = 'federated'"),
    ],
)
def test_given_keys_without_effect_are_warned_of(
    tmp_path: Path, word: str, key: str, need: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, value = word.split("=", 1)
    path = tmp_path / "my.toml"
    path.write_text("")
    print_unused(read_config(path, [word]), path, [word])
    path.write_text(f"{name} = {repr(value) if 'args' in name else value}\n")
    print_unused(read_config(path), path, [])
    on_the_command_line, in_the_file = capsys.readouterr().err.splitlines()
    assert on_the_command_line == in_the_file
    assert in_the_file.startswith(f"warning: {key} has no effect") and need in in_the_file


def test_run_resume_and_doctor_warn_of_keys_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=1))
    monkeypatch.setattr("fedeas_flwr.commands.run.start", lambda *_: None)
    (tmp_path / "my.toml").write_text("clients = 4\n")
    for words in (("run", str(tmp_path / "my.toml")), ("resume", str(run.path)), ("doctor", "--format", "json")):
        done = run_in_process(*words, "moon-mu=1", cwd=tmp_path)
        assert done.stderr.startswith("warning: moon-mu = 1.0 has no effect") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("", ["fedprox-mu=0.01", "policy=none", "beta=6"]),
        ("", ["strategy=fedmix", "disclose-mean-images=true", "fedmix-lambda=0.5"]),
        ("", ["policy=uniform", "printed-rule=true"]),
        ("guidance = 2.0\nstrategy = 'fedprox'\nfedprox-mu = 0.5\n", ["policy=none", "strategy=moon"]),
        ("fedprox-mu = 0.5\n", ["strategy=fedprox"]),
    ],
)
def test_keys_with_an_effect_in_the_run_or_file_are_not_warned_of(
    tmp_path: Path, file: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(file)
    print_unused(read_config(path, words), path, words)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("words", [[], ["policy=none"], ["policy=uniform", "strategy=moon"]], ids=len)
def test_shipped_confs_give_no_warning(path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    print_unused(read_config(path, words), path, words)
    assert capsys.readouterr().err == ""


def test_identity_leaves_out_free_and_resumable_keys() -> None:
    found = identity(parse_config({"policy": "none"}), ("seed",))
    assert found["alpha"] == 0.1 and not {"seed", "backend", "resume", "beta"} & found.keys()
    assert set(PARTITION_KEYS) <= found.keys()
