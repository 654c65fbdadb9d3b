"""All that is measured."""

from __future__ import annotations

import re

from bench.harness import Case
from bench.operations import arrow, depth, durable, latency, lateness, puts, reopen, scan, server, spark, takes, topics
from bench.scale import Scale


def all_cases(scale: Scale, only: str = "") -> list[Case]:
    """The cases of every operation, or those whose "operation: contestant" matches a pattern.

    Ours stays in when a peer is picked: a figure without the one to compare it with is of no use.
    """
    modules = (puts, arrow, durable, takes, topics, latency, lateness, depth, reopen, scan, server, spark)
    cases = [case for module in modules for case in module.cases(scale)]
    if not only:
        return cases
    wanted = re.compile(only, re.IGNORECASE)
    picked = [case for case in cases if wanted.search(f"{case.operation.name}: {case.contestant}")]
    operations = {case.operation for case in picked}
    return [case for case in cases if case in picked or (case.is_ours and case.operation in operations)]
