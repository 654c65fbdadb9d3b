"""`holdfast worker`: mistakes in the call. What it does otherwise is shown by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.unit.commands import Run, runner


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "handlers_of_test.py").write_text("NUMBER = 7\nclass Kind: ...\ndef handle(message): ...\n")
    (tmp_path / "broken_of_test.py").write_text("import json\n\nraise RuntimeError('no database')\n")
    (tmp_path / "needy_of_test.py").write_text("import no_such_module_at_all\n")
    with holdfast.open(tmp_path / "q"):
        pass
    return runner(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("handlers_of_test", "handlers_of_test names no handler: write module:function"),
        ("handlers_of_test:", "names no handler"),
        ("nothing_of_test:handle", "there is no module nothing_of_test, neither in "),
        ("handlers_of_test.inner:handle", "there is no module handlers_of_test.inner"),
        ("handlers_of_test:handel", "handlers_of_test has no handel; its functions are handle"),
        ("handlers_of_test:handle.inner", "handlers_of_test has no handle.inner"),
        ("handlers_of_test:NUMBER", "handlers_of_test:NUMBER is not a function but a int"),
        ("handlers_of_test:Kind", "the handler is the class Kind"),
        ("broken_of_test:handle", "broken_of_test cannot be imported: RuntimeError: no database ("),
        ("needy_of_test:handle", "needy_of_test cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_a_handler_that_cannot_be_had_is_one_sentence(call: Run, handler: str, said: str):
    done = call("worker", handler, "--at", "q")
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--at", "missing"], "there is no folder missing"),
        (["--at", "http://127.0.0.1:1"], "choose a queue with --queue"),
        (["--at", "q", "--lease", "long"], "--lease 'long' cannot be used"),
        (["--at", "q", "--drain", "-1"], "--drain"),
        (["--at", "missing", "--queue", "q"], "there is no folder missing"),
        (["--at", "q", "--queue", "no/thing"], "no/thing"),
        (["--at", "http://127.0.0.1:1", "--queue", "no/thing"], "no/thing"),
        (["--at", "http://h", "--queue", "a", "--queue", "b", "--concurrency", "1"], "too low for 2 queues"),
        ([], "--at"),
    ],
)
def test_mistakes_in_the_options_are_one_sentence(call: Run, options: list[str], said: str):
    done = call("worker", "handlers_of_test:handle", *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert len(done.err.splitlines()) == 1
