"""Pages whose examples need a server: it is begun for them, and answers where they say that it does.

`<!-- with a server: holdfast serve data -->` on a page asks for it. Then its `console` blocks are run, too: every
line that begins with `$ `, but for the one that begins the server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tidy.markdown import Block

ADDRESS = "http://127.0.0.1:7700"
_MARK = re.compile(r"^<!-- with a server: holdfast (serve \S+.*) -->$", re.MULTILINE)
_STARTING = re.compile(r"holdfast serve\b")


def wanted(text: str) -> list[str] | None:
    """The arguments of the server that a page asks for."""
    found = _MARK.search(text)
    return found[1].split() if found else None


def program(block: Block) -> str:
    """What a block does, as Python: an `export` holds for the rest of the page."""
    if block.language == "python":
        return block.code
    steps = ["import os, subprocess"]
    for command in commands(block.code):
        exported = re.fullmatch(r"export (\w+)=(\S*)", command)
        if exported:
            steps.append(f"os.environ[{exported[1]!r}] = {exported[2]!r}")
        elif not _STARTING.match(command):
            command = re.sub(r"^curl\b", "curl --fail-with-body", command)  # an error is one, as everywhere
            steps.append(f"subprocess.run(['bash', '-e', '-o', 'pipefail', '-c', {command!r}], check=True)")
    return "\n".join(steps)


def commands(code: str) -> list[str]:
    """The commands of a session in a shell, without what they print."""
    found: list[str] = []
    goes_on = False
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif goes_on:
            found[-1] += f"\n{line}"
        goes_on = bool(found) and found[-1].endswith("\\") and (line.startswith("$ ") or goes_on)
    return found


def shell_environment() -> dict[str, str]:
    """An environment in which `holdfast` is the one that is tested, and nothing says where to work."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"}


@contextmanager
def server(arguments: list[str], folder: Path) -> Iterator[str]:
    """A server in a folder; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *arguments, "--port", "0"],
        cwd=folder,
        env=shell_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, "the server did not say where it listens"
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)
