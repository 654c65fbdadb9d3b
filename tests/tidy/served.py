"""Pages with commands for a shell: they are run, with a server where the page asks for one.

In a `console` block, every line that begins with `$ ` is a command, and the lines below it are what it prints; `...`
and `…` stand for anything. A command that starts a worker is ended once the worker has started. An `sh` block is a
script, of which no step may fail. A `toml` or `yaml` block whose first line is the name of a file, as a comment, is
that file.

`<!-- with a server: holdfast serve data -->` on a page asks for a server, which prints what the page shows below that
command; other commands that start a server are left out. What a script or a worker needs of its reader's machine, such
as a file or a program, stands in a comment that begins with `<!-- given:`, and is run first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tidy.markdown import Block, blocks

ADDRESS = "http://127.0.0.1:7700"
_MARK = re.compile(r"^<!-- with a server: holdfast (serve \S+.*) -->$", re.MULTILINE)
_GIVEN = re.compile(r"^<!-- given:\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (?P<name>[\w.-]+\.(?:toml|yaml))\n")
_SERVING = re.compile(r"holdfast serve\b")
_WORKING = re.compile(r"holdfast worker\b")

# A command and what it is to print, on a page that is run; nothing is asked of one that shows no output.
_CHECK = """
def _run(command, expected):
    import re, subprocess
    shell = ["bash", "-e", "-o", "pipefail", "-c"]
    done = subprocess.run([*shell, command], check=True, stdout=subprocess.PIPE, text=True)
    pattern = ".*".join(map(re.escape, re.split(r"\\s*(?:\\.\\.\\.|…)\\s*", expected.strip())))
    printed = "\\n".join(map(str.rstrip, done.stdout.strip().splitlines()))
    assert not expected or re.fullmatch(pattern, printed, re.DOTALL), f"{command} printed:\\n{printed}"

def _work(command):
    import subprocess
    told = []
    with subprocess.Popen(["bash", "-c", f"exec {command}"], stderr=subprocess.PIPE, text=True) as worker:
        for line in worker.stderr:
            told.append(line)
            if "worker started" in line:
                worker.terminate()
    assert worker.returncode == 0, f"{command} said:\\n{''.join(told)}"
"""


def wanted(text: str) -> list[str] | None:
    """The arguments of the server that a page asks for."""
    found = _MARK.search(text)
    return found[1].split() if found else None


def greeting(text: str) -> str:
    """What the server that a page asks for prints when it starts, if the page shows that."""
    asked = " ".join(["holdfast", *(wanted(text) or ["nothing"])])
    shown = [each for block in blocks(text) if block.language == "console" for each in commands(block.code)]
    return next((printed for command, printed in shown if command == asked), "")


def given(text: str) -> str:
    """What the scripts of a page find on their reader's machine."""
    found = _GIVEN.search(text)
    return found[1] if found else ""


def program(block: Block, given: str = "") -> str:
    """What a block does, as Python: an `export` of a `console` block holds for the rest of the page."""
    if block.language == "python":
        return block.code
    if block.language in {"toml", "yaml"}:
        named = _FILE.match(block.code)
        return f"import pathlib\npathlib.Path({named['name']!r}).write_text({block.code!r})" if named else ""
    if block.language == "sh":
        return f"{_CHECK}\n_run({given + block.code!r}, '')"
    steps = ["import os", _CHECK]
    for command, expected in commands(block.code):
        exported = re.fullmatch(r"export (\w+)=(\S*)", command)
        if exported:
            steps.append(f"os.environ[{exported[1]!r}] = {exported[2]!r}")
        elif _WORKING.match(command):
            steps += [f"_run({given!r}, '')", f"_work({command!r})"]
        elif not _SERVING.match(command):
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


def shell_environment(python: str = sys.executable, home: Path | None = None) -> dict[str, str]:
    """An environment in which `holdfast` is the one that is tested, and nothing says where to work."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "XDG_", "COLUMNS"))}
    if home is not None:
        kept["HOME"] = str(home)
    if python != sys.executable:
        kept.pop("PYTHONPATH", None)  # it names what is tested here, and that one is installed elsewhere
    return {**kept, "PATH": f"{Path(python).parent}{os.pathsep}{kept['PATH']}"}


@contextmanager
def server(arguments: list[str], folder: Path, python: str = sys.executable, *, greeting: str = "") -> Iterator[str]:
    """A server in a folder, which begins with what a page says; gives its address."""
    process = subprocess.Popen(
        [python, "-m", "holdfast", *arguments, "--port", "0"],
        cwd=folder,
        env=shell_environment(python),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        found = re.search(r"http://\S+", told)
        assert found is not None, "the server did not say where it listens"
        told += "".join(process.stdout.readline() for _ in greeting.splitlines()[1:])
        assert not greeting or told.replace(found[0], ADDRESS) == greeting, f"the server says:\n{told}"
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)
