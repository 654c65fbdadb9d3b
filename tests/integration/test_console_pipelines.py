"""Pages of pipelines over HTTP: what they show of the runs that a lake has noted, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.console_day import RUNS, run_pipelines
from tests.integration.http_gear import Serving, serving
from tests.integration.test_console_charts import page
from tests.integration.test_http_access import guarded


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    run_pipelines(tmp_path / "lake")
    with serving(tmp_path / "data", whole=True, lake=str(tmp_path / "lake")) as found:
        yield found


def test_every_pipeline_is_listed_with_its_last_run(server):
    text = page(server, "/ui/pipelines")
    assert [text.index(f'href="/ui/pipelines/{name}"') for name in ("orders-land", "orders-proof", "orders-silver")]
    assert "differences found" in text  # by the proof
    assert f"2 of {RUNS}" in text  # failed runs of the one that refines
    assert text.count('<svg class="spark"') == 3
    assert 'href="/ui/pipelines" aria-current="page"' in text


def test_a_pipeline_has_charts_and_a_table_of_its_runs(server):
    text = page(server, "/ui/pipelines/orders-silver")
    assert text.count("<figure") == 4
    assert text.count('data-label="outcome"') == RUNS
    assert text.count("there is no column amount") == 2
    assert "has_id failed for 12 rows" in text
    assert server.get("/ui/pipelines/nix", headers={"accept": "text/html"}).status == 404


def test_a_run_more_is_seen_and_notes_that_cannot_be_read_are_passed_over(server, tmp_path):
    checkpoints = tmp_path / "lake/_checkpoints"
    (checkpoints / "orders-land/runs.json").write_text('[{"at_ms": 1, "ok": false, "error": "<b>no</b>"}]')
    (checkpoints / "orders-proof/runs.json").write_text("[{")
    (checkpoints / "orders-silver/spec.json").write_text("spoiled")
    text = page(server, "/ui/pipelines")
    assert "1 of 1" in text
    assert "has not run yet" in text
    assert "orders-silver" not in text
    assert "&lt;b&gt;no&lt;/b&gt;" in page(server, "/ui/pipelines/orders-land")


def test_a_lake_that_is_empty_or_not_named_says_what_to_do(tmp_path):
    with serving(tmp_path / "a", whole=True, lake=str(tmp_path / "none")) as server:
        assert "holdfast pipeline run" in page(server, "/ui/pipelines")
    with serving(tmp_path / "b", whole=True) as server:
        answer = server.get("/ui/pipelines", headers={"accept": "text/html"})
        assert answer.status == 404
        assert "--lake FOLDER" in answer.body.decode()
        assert "/ui/pipelines" not in page(server, "/ui/groups")


def test_only_those_who_may_read_everything_see_pipelines(tmp_path):
    run_pipelines(tmp_path / "lake")
    with guarded(tmp_path, lake=str(tmp_path / "lake")) as server:
        for path in ("/ui/pipelines", "/ui/pipelines/orders-land"):
            assert server.get(path, token="token-of-reader").status == 200
            assert server.get(path, token="token-of-of-these").status == 403
        assert b"/ui/pipelines" not in server.get("/ui/groups", token="token-of-of-these").body
