"""Programs in a process of their own: for what one session cannot show (retries, kills, another Java)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_script(
    script: Path | str, timeout_s: float = 120, *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a file, or code as text, in an empty folder. What it started (a JVM) ends with it, also when time is up.

    `tests` can be imported, by the program and by Spark's workers.
    """
    variables = dict(os.environ if environment is None else environment)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, "-c", script]
    with tempfile.TemporaryDirectory(prefix="holdfast-script-") as folder:
        running = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = running.communicate(timeout=timeout_s)
        finally:
            # The group outlives its leader as long as one member does.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    return subprocess.CompletedProcess(command, running.returncode, output, errors)
