"""The console of a cluster in a browser: any node shows all queues, and the page of the cluster follows its owners."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.browser.browsing import NARROW, visiting
from tests.integration.cluster_gear import cluster


def test_any_node_shows_all_queues_and_who_owns_them(browser: Browser, tmp_path: Path):
    with cluster(tmp_path, nodes=2, shards=4) as two:
        first, second = two.nodes
        topics = [two.topic_on(node, f"jobs-{at}") for at, node in enumerate(two.nodes)]
        with two.connect() as broker:
            for topic in topics:
                broker.queue(topic).put(b"hello from " + topic.encode())
        with visiting(browser, f"{first.url}/ui") as visit:
            page = visit.page
            for topic in topics:
                expect(page.locator("#queues").get_by_role("link", name=topic)).to_be_visible()
            page.locator("#queues").get_by_role("link", name=topics[1]).click()  # of the other node
            expect(page.get_by_text(f"hello from {topics[1]}")).to_be_visible()
            page.get_by_role("navigation").get_by_role("link", name="Cluster").click()
            rows = page.get_by_role("region", name="Shards").locator("tbody tr")
            expect(rows).to_have_count(4)
            expect(page.locator("#cluster").get_by_text("this one")).to_be_visible()
            owners = {row.locator("[data-label=owner]").inner_text() for row in rows.all()}
            assert owners == {first.name, second.name}
            second.stop()
            for row in rows.all():  # the page looks again by itself
                expect(row.locator("[data-label=owner]")).to_have_text(first.name)
        with visiting(browser, f"{first.url}/ui/cluster", size=NARROW) as visit:
            assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
