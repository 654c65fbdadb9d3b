"""Pages whose examples need a server: it is begun for them, and answers where they say that it does.

`<!-- with a server: holdfast serve data -->` on a page asks for it. Then its `console` blocks are run, too: every
line that begins with `$ `, but for those that begin a server or a worker, which go on until somebody stops them. The
lines below a command are what it prints; `...` and `…` stand for anything.
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
_STARTING = re.compile(r"holdfast (?:serve|worker)\b")

# A command and what it is to print, on a page that is run; nothing is asked of one that shows no output.
_CHECK = """
def _run(command, expected):
    import re, subprocess
    shell = ["bash", "-e", "-o", "pipefail", "-c"]
    done = subprocess.run([*shell, command], check=True, stdout=subprocess.PIPE, text=True)
    pattern = ".*".join(map(re.escape, re.split(r"\\s*(?:\\.\\.\\.|…)\\s*", expected.strip())))
    printed = "\\n".join(map(str.rstrip, done.stdout.strip().splitlines()))
    assert not expected or re.fullmatch(pattern, printed, re.DOTALL), f"{command} printed:\\n{printed}"
"""


def wanted(text: str) -> list[str] | None:
    """The arguments of the server that a page asks for."""
    found = _MARK.search(text)
    return found[1].split() if found else None


def program(block: Block) -> str:
    """What a block does, as Python: an `export` holds for the rest of the page."""
    if block.language == "python":
        return block.code
    steps = ["import os", _CHECK]
    for command, expected in commands(block.code):
        exported = re.fullmatch(r"export (\w+)=(\S*)", command)
        if exported:
            steps.append(f"os.environ[{exported[1]!r}] = {exported[2]!r}")
        elif not _STARTING.match(command):
            command = re.sub(r"^curl\b", "curl --fail-with-body", command)  # an error is one, as everywhere
            steps.append(f"_run({command!r}, {expected!r})")
    return "\n".join(steps)


def commands(code: str) -> list[tuple[str, str]]:
    """The commands of a session in a shell, each with what it prints."""
    found: list[tuple[str, str]] = []
    goes_on = False
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            command, printed = found[-1]
            found[-1] = (f"{command}\n{line}", printed) if goes_on else (command, f"{printed}{line}\n")
        goes_on = bool(found) and not found[-1][1] and found[-1][0].endswith("\\")
    return found


def shell_environment(python: str = sys.executable) -> dict[str, str]:
    """An environment in which `holdfast` is the one that is tested, and nothing says where to work."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    if python != sys.executable:
        kept.pop("PYTHONPATH", None)  # it names what is tested here, and that one is installed elsewhere
    return {**kept, "PATH": f"{Path(python).parent}{os.pathsep}{kept['PATH']}"}


@contextmanager
def server(arguments: list[str], folder: Path, python: str = sys.executable) -> Iterator[str]:
    """A server in a folder; gives its address."""
    process = subprocess.Popen(
        [python, "-m", "holdfast", *arguments, "--port", "0"],
        cwd=folder,
        env=shell_environment(python),
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
