"""The files for operators are sound, and do what the docs say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.config.settings_file import load_settings
from tests.tidy import markdown
from tests.tidy.repo import ROOT

PACKAGING = ROOT / "packaging"
UNIT = (PACKAGING / "holdfast.service").read_text("utf-8")
CONTAINER = (PACKAGING / "Containerfile").read_text("utf-8")
PAGE = (ROOT / "docs" / "how-to" / "run-as-a-service.md").read_text("utf-8")
HOLDFAST = Path(sys.executable).parent / "holdfast"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path):
    unit = tmp_path / "holdfast.service"
    unit.write_text(UNIT.replace("/opt/holdfast/bin/holdfast", str(HOLDFAST)), "utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    about_it = [line for line in done.stderr.splitlines() if "holdfast" in line]
    assert (done.returncode, about_it) == (0, [])


def test_the_example_settings_can_be_used():
    text = (PACKAGING / "holdfast.toml").read_text("utf-8")
    assert load_settings(text, {}, path="holdfast.toml").server.host == "127.0.0.1"
    all_of_it = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE).replace('host = "127.0.0.1"\n', "")
    server = load_settings(all_of_it, {}, path="holdfast.toml").server
    assert (server.host, server.tokens_file) == ("0.0.0.0", "/etc/holdfast/tokens.toml")
    assert server.socket == "/run/holdfast/holdfast.sock"


def test_the_unit_gives_the_server_more_time_than_it_takes_to_drain():
    settings = load_settings((PACKAGING / "holdfast.toml").read_text("utf-8"), {}, path="holdfast.toml").server
    found = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert found is not None
    assert int(found[1]) * 1000 > settings.drain_ms + 10_000


@pytest.mark.parametrize("command", ["unit", "container"])
def test_what_is_started_is_a_command_that_there_is(command: str):
    words = re.search(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)[1].split() if command == "unit" else started()
    assert words[1] == "serve"
    done = subprocess.run([HOLDFAST, "serve", "--help"], capture_output=True, text=True, timeout=60, check=True)
    for word in words:
        if word.startswith("--"):
            assert word in done.stdout


def started() -> list[str]:
    """What the container begins."""
    entry, arguments = (
        json.loads(re.search(rf"^{name} (\[.*\])$", CONTAINER, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD")
    )
    return [*entry, *arguments]


def test_the_page_speaks_of_the_paths_the_port_and_the_user_of_the_files():
    written = markdown.code(PAGE)
    for word in ("/opt/holdfast", "/etc/holdfast/holdfast.toml", "/etc/systemd/system/holdfast.service", "7700"):
        assert word in written
    assert "--uid 10001" in CONTAINER
    assert "user 10001" in PAGE
    assert "podman build -t holdfast -f packaging/Containerfile ." in written
    assert "podman build -t holdfast -f packaging/Containerfile ." in CONTAINER
    extras = re.search(r"\[([\w,]+)\]' &&", CONTAINER)
    assert extras is not None
    assert f"'.[{extras[1]}]'" in written
    for line in ("User=holdfast", "/var/lib/holdfast"):
        assert line in UNIT


def test_what_the_container_copies_is_there():
    for line in re.findall(r"^COPY (.*)$", CONTAINER, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_the_other_supported_versions_of_python_are_found_on_the_path_or_by_pyenv(tmp_path: Path):
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert supported == ["3.11", "3.12", "3.13"]
    ours = program(tmp_path / "ours" / "python", "echo 3.11")
    named = program(tmp_path / "bin" / "python3.12", "exit 0")
    assert pythons(tmp_path, ours) == ([named], "Python 3.13 is not on this machine: its tests are left out.\n")
    program(tmp_path / "bin" / "python3.13", "exit 127")  # a name without a Python behind it, as pyenv makes them
    kept = program(tmp_path / "versions" / "3.13.0" / "bin" / "python", "exit 0")
    assert pythons(tmp_path, ours) == ([named, kept], "")


def program(path: Path, does: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


def pythons(folder: Path, ours: str) -> tuple[list[str], str]:
    """What `make versions` finds on a machine that has this folder only, beside the usual tools."""
    (folder / "bin" / "sed").unlink(missing_ok=True)
    (folder / "bin" / "sed").symlink_to(str(shutil.which("sed")))
    environ = {"PATH": str(folder / "bin"), "PYENV_ROOT": str(folder)}
    script = ["/bin/sh", "tools/pythons.sh", ours]
    done = subprocess.run(script, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines(), done.stderr
