"""Commands, run in this process, and how they ended."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.cli.main import main


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]


Run = Callable[..., Done]


def ended(capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...]) -> Done:
    """Run a command to its end."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return Done(int(end.value.code or 0), out, err)


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """What runs a command, with or without something on stdin."""
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("RECEIPT", "GROUP", "QUEUE", "URL", "TOKEN"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)
    monkeypatch.setenv("HOLDFAST_PROFILES", "/nonexistent/profiles.toml")

    def call(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return ended(capsys, arguments)

    return call


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
