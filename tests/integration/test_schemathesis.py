"""Thousands of calls, fitting and not, made of the API's own description: no failure inside, nothing undescribed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.http_gear import Serving, serving

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
REFUSED = [400, 401, 403, 404, 405, 409, 413, 415, 416, 422, 429, 431]
# Those that go on until the caller ends them, and the one call that would make thousands of partitions.
LEFT_OUT = r"subscribe|/watch$|/topics/\{topic\}/partitions$"


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_no_call_fails_inside_and_no_answer_is_undescribed(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    with serving(tmp_path / "data", max_wait_ms=20) as server:
        for name in ("orders", "mail"):
            server.request("PUT", f"/v1/queues/{name}", {})
        described = tmp_path / "openapi.json"
        described.write_text(json.dumps(_of_few_partitions(server)))
        settings = tmp_path / "schemathesis.toml"
        settings.write_text(f"[checks]\nnegative_data_rejection.expected-statuses = {REFUSED}\n")
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)),
            *("run", str(described), "--url", server.url),
            *("--checks", ",".join(CHECKS), "--exclude-path-regex", LEFT_OUT),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", str(scale(5, 1_000))),
            *("--request-timeout", "30", "--continue-on-failure", "--generation-database", "none", "--no-color"),
        ]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.integration.schemathesis_hooks"}
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **hooks}, cwd=Path(__file__).parents[2]
        )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    cases = re.search(r"([\d,]+) generated", done.stdout)
    assert cases is not None, done.stdout[-2_000:]
    assert int(cases[1].replace(",", "")) > 2_000, cases[0]


def _of_few_partitions(server: Serving) -> object:
    """The description, without the number of partitions: ten thousand are allowed, and take a while to make."""
    document = server.get("/openapi.json").body
    for name in ("CreateTopic", "CreateQueue"):
        del document["components"]["schemas"][name]["properties"]["partitions"]
    return document
