"""The pictures of the console in the docs, taken anew: `python -m tests.browser.pictures`."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser

import holdfast
from holdfast.broker.samples import TOTAL
from holdfast.codec.samples import SeriesKey, Slot
from tests.browser.browsing import NARROW, WIDE, browsing, visiting
from tests.integration.console_day import failed, live_a_day, taken
from tests.integration.http_gear import Serving, serving

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WARM_UP_S = 25

FIRST = [f"returns.dlq-0-{number}" for number in range(10)]

PICTURES = {
    "console-overview": ("/ui", WIDE, False),
    "console-queue": ("/ui/queues/orders", WIDE, False),
    "console-charts": ("/ui/queues/mails/charts", WIDE, False),
    "console-message": ("/ui/queues/orders/messages/orders.dlq-0-0", WIDE, False),
    "console-dead": ("/ui/queues/orders/dead", WIDE, True),
    "console-search": ("/ui/search?q=key%3Dc-3+age%3C1h", WIDE, False),
    "console-redriven": ("/ui/queues/returns/redriven?ids=" + ",".join(FIRST), WIDE, False),
    "console-log": ("/ui/queues/orders/log", WIDE, False),
    "console-settings": ("/ui/queues/orders/settings", WIDE, False),
    "console-audit": ("/ui/audit", WIDE, False),
    "console-schedules": ("/ui/schedules", WIDE, False),
    "console-workers": ("/ui/workers", WIDE, False),
    "console-health": ("/ui/health", WIDE, True),
    "console-narrow": ("/ui", NARROW, False),
    "console-narrow-dark": ("/ui/queues/orders/dead", NARROW, True),
}


def live(server: Serving, ending: threading.Event) -> None:
    """Producers and workers with little luck, so that there is something to see."""
    steps = 0
    while not ending.wait(0.1):
        steps += 1
        if steps % 60 == 30:
            failed(server, ["TimeoutError: no answer from the shop within 30 s"])
        for i, queue in enumerate(("mails", "thumbnails", "webhooks")):
            count = round(5 + 4 * math.sin(steps / (12 + 5 * i) + i))
            bodies = [{"json": {"to": f"customer-{steps}"}}] * count
            server.post(f"/v1/queues/{queue}/batch", {"messages": bodies})
            taken = server.post(f"/v1/queues/{queue}/dequeue", {"count": 6, "owner": f"{queue}-worker-1"}).body
            receipts = [message["receipt"] for message in taken["messages"]]
            if receipts:
                server.post(f"/v1/queues/{queue}/ack", {"receipts": receipts})


def redrive_a_few(server: Serving) -> None:
    """Ten dead letters that were redriven: most succeed, some fail as before, and others are left."""
    assert server.request("PUT", "/v1/queues/returns", {"settings": {"max_attempts": 1}}).status == 200
    bodies = [{"json": {"return": number}, "key": f"c-{number}"} for number in range(24)]
    server.post("/v1/queues/returns/batch", {"messages": bodies})
    failed(server, ["ConnectionError: the warehouse does not answer"] * 24, queue="returns")
    assert server.post("/v1/queues/returns/dead/redrive", {"ids": FIRST}).body["done"] == 10
    receipts = taken(server, 10, queue="returns", owner="returns-worker-1")
    server.post("/v1/queues/returns/ack", {"receipts": receipts[:7]})
    error = "ConnectionError: the warehouse does not answer"
    server.post("/v1/queues/returns/nack", {"receipts": receipts[7:], "error": error})


def schedule(server: Serving) -> None:
    """Schedules of each kind: one that fires, one that is paused, one that was run by hand."""
    put = {
        "weekly-invoices": {"topic": "mails", "text": "send", "cron": "0 8 * * mon", "timezone": "Europe/Berlin"},
        "poll-warehouse": {"topic": "webhooks", "text": "poll", "every": 2, "jitter": 1},
        "newsletter": {"topic": "mails", "text": "weekly", "cron": "0 9 * * fri", "timezone": "America/New_York"},
    }
    for name, values in put.items():
        assert server.request("PUT", f"/v1/schedules/{name}", values).status == 200
    assert server.post("/v1/schedules/newsletter/pause").status == 200
    assert server.post("/v1/schedules/nightly-export/run").status == 200


def wait(server: Serving) -> None:
    """A worker with nothing to do."""
    server.post("/v1/queues/reports/dequeue", {"wait": -1, "owner": "reports-worker-1"})


@contextmanager
def working(server: Serving) -> Iterator[None]:
    """Two workers that report themselves: one at work, one told to drain."""

    def handle(message: holdfast.Message[bytes]) -> None:
        time.sleep(4)
        if int(message.id.rpartition("-")[2]) % 9 == 4:
            raise ConnectionError("the printer does not answer")

    for name in ("labels", "invoices"):
        assert server.request("PUT", f"/v1/queues/{name}", {}).status == 200
        bodies = [{"json": {"number": number}} for number in range(40)]
        server.post(f"/v1/queues/{name}/batch", {"messages": bodies})
    workers = [
        holdfast.Worker(handle, queue=f"{server.url}/{name}", name=f"{name}-{number}", concurrency=3)
        for number, name in enumerate(("labels", "invoices"), start=1)
    ]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        while len(found := server.get("/v1/workers").body["workers"]) < len(workers):
            time.sleep(0.1)
        (idle,) = (each["id"] for each in found if each["name"] == "invoices-2")
        assert server.post(f"/v1/workers/{idle}/drain").status == 200
        yield
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()


def take(browser: Browser, server: Serving) -> None:
    for name, (path, size, dark) in PICTURES.items():
        with visiting(browser, server.url + path, size=size, dark=dark) as visit:
            visit.page.screenshot(path=FOLDER / f"{name}.png")


def sample_the_past(server: Serving) -> None:
    """Samples of the last quarter of an hour, so that the lines are long after a short while; with one burst."""
    engine = server.server.service.engine
    now_s = engine.world.clock.now_ns() // 1_000_000_000
    keys = [SeriesKey("queue", name, "default", engine.topic(name).id) for name in ("mails", "thumbnails", "webhooks")]
    for ago_s in range(900, 0, -5):
        for i, key in enumerate([*keys, TOTAL]):
            wave = math.sin(ago_s / (60 + 25 * i) + i)
            share = len(keys) if key is TOTAL else 1
            burst = 20_000 if ago_s in (295, 300) and key.topic in ("", "mails") else 0
            came = share * (250 + 200 * wave) + burst
            done = share * (250 + 190 * math.sin((ago_s + 8) / (60 + 25 * i) + i))
            quick_s = 0.02 + 0.01 * (1 + wave)
            slot = Slot(now_s - ago_s, came, done, max(8 * wave - 6, 0), 60 * share * (1 + wave), 0, 3 * (1 + wave))
            engine.sampler.store.merge(key, slot, [(quick_s, 6 * quick_s)] * 3)


def main() -> None:
    ending = threading.Event()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "data", whole=True) as server:
        live_a_day(server)
        sample_the_past(server)
        redrive_a_few(server)
        schedule(server)
        assert server.request("PUT", "/v1/queues/reports", {}).status == 200
        for _ in range(2):
            threading.Thread(target=wait, args=(server,), daemon=True).start()
        living = threading.Thread(target=live, args=(server, ending))
        living.start()
        try:
            with working(server):
                time.sleep(WARM_UP_S)
                with browsing() as browser:
                    take(browser, server)
        finally:
            ending.set()
            living.join()


if __name__ == "__main__":
    main()
