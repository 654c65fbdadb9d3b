"""Fixtures for tests in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.browsing import browser_path
from tests.integration.console_day import live_a_day, run_pipelines
from tests.integration.http_gear import Serving, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)
            if browser_path() is None:
                item.add_marker(pytest.mark.skip(reason="there is no Chromium; run tools/browser.sh as root"))


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """One for all tests of a module, and ended with it: while it is there, no other loop may run in this thread."""
    from tests.browser.browsing import browsing

    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with messages in every phase; the tests that share it only look."""
    home = tmp_path_factory.mktemp("day")
    run_pipelines(home / "lake")
    with serving(home / "data", whole=True, lake=str(home / "lake")) as found:
        live_a_day(found)
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        yield found
