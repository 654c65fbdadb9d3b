"""Asking before something is changed for good."""

from __future__ import annotations

import sys

from holdfast.cli.output import stderr
from holdfast.errors import InvalidRequest


def confirmed(question: str, what: str, *, yes: bool, as_json: bool) -> bool:
    """Whether it may be done. Where nobody can answer and nobody said yes beforehand, that is an error."""
    if yes:
        return True
    if as_json or not somebody_answers():
        raise InvalidRequest(
            f"{what} asks before it changes anything, and nobody is there to answer: "
            "look at it with --dry-run, then run it again with --yes. Nothing was changed"
        )
    # Not by way of `input`, which would put a part of the question on stdout.
    sys.stdout.flush()
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not answer:
        stderr().print("Nothing was changed.")
    return answer


def somebody_answers() -> bool:
    return sys.stdin.isatty()
