"""The guides for those who come from Celery and RQ, as one follows them: the program first, then the command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from tests.tidy import markdown
from tests.tidy.repo import ROOT
from tests.tidy.served import shell_environment

PATIENCE_S = 120
GUIDES = {
    "migrate-from-celery": ("mails", {"task": "send_mail", "arguments": {"user": 8, "subject": "again"}}),
    "migrate-from-rq": ("images", {"image": 43}),
}


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_the_command_of_a_guide_handles_what_its_program_put(guide: str, tmp_path: Path):
    text = (ROOT / f"docs/how-to/{guide}.md").read_text("utf-8")
    (program,) = [each.code for each in markdown.blocks(text) if "import holdfast" in each.code]
    functions, opening, rest = program.partition("\nwith holdfast.open(")
    (tmp_path / "shop.py").write_text(functions + "\n")
    environment = shell_environment()
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=PATIENCE_S)
    folder, body = GUIDES[guide]
    assert (opening, folder in rest) == ("\nwith holdfast.open(", True)
    with holdfast.open(tmp_path / folder, body_type=dict) as queue:
        queue.put(body)
    (command,) = {each for each in markdown.spans(text) if re.match(rf"holdfast worker {folder} shop:\w+", each)}
    words = [sys.executable, "-m", *command.split()]
    worker = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert settled(tmp_path / folder) == (0, 0)
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=PATIENCE_S)
        assert worker.returncode == 0, log
    finally:
        worker.kill()
        worker.communicate()


def settled(folder: Path) -> tuple[int, int]:
    """How many wait for another attempt and how many are dead, once each has been handled."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        with holdfast.open(folder) as queue:
            now = queue.stats()
        if not now.ready + now.leased or time.monotonic() > give_up:
            return now.delayed, now.dead
        time.sleep(0.1)
