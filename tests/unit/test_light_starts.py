"""What a process loads before it does its work: a server that was killed is back as soon as it has loaded that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import checksum

COMMAND = [sys.executable, "-X", "importtime", "-m", "holdfast"]
# Needed by some calls, or by some commands: whoever comes first there waits for them.
LATER = {"jinja2", "opentelemetry", "prometheus_client", "pyarrow", "pydantic", "python_multipart", "rich.console"}


def loaded(report: str) -> set[str]:
    """The modules that Python tells of when it is asked how long they took."""
    lines = [line.rpartition("|")[2].strip() for line in report.splitlines() if line.startswith("import time:")]
    assert "holdfast" in lines
    return set(lines)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--no-console"]], ids=["with the console", "without"])
def test_a_server_listens_before_it_loads_what_only_some_calls_need(tmp_path: Path, more: list[str]):
    log = tmp_path / "log"
    command = [*COMMAND, "serve", str(tmp_path / "data"), "--port", "0", *more]
    with log.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        server.kill()
    found = loaded(log.read_text())
    assert b" at http://" in said
    assert not found & (LATER | {"holdfast.server.openapi", "holdfast.server.forms"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["put", "x"], ["put", "y", "--header", "a=b", "--wait", "5s"]], ids=["plain", "with options"]
)
def test_a_quick_command_takes_its_arguments_without_a_library_for_models(tmp_path: Path, arguments: list[str]):
    name, *rest = arguments
    command = [*COMMAND, name, str(tmp_path / "jobs"), *rest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pydantic" not in loaded(done.stderr)


def test_the_package_brings_no_reader_of_mail_and_archives_with_it():
    command = [sys.executable, "-X", "importtime", "-c", "import holdfast.storage"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not loaded(done.stderr) & {"crc32c", "email", "importlib.metadata", "zipfile"}


@pytest.mark.parametrize("content", [b"", b"123456789", b"\x00" * 32, bytes(range(256)) * 100])
def test_the_checksum_is_that_of_the_package(content: bytes):
    import crc32c

    assert checksum.crc32c(content) == crc32c.crc32c(content)
    assert checksum.crc32c(memoryview(content)[1:], 7) == crc32c.crc32c(content[1:], 7)
