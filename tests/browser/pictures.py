"""The pictures of the console in the docs, taken anew: `python -m tests.browser.pictures`."""

from __future__ import annotations

import math
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import Browser

from holdfast.server.console import overview
from tests.browser.browsing import NARROW, WIDE, browsing, visiting
from tests.integration.console_day import failed, live_a_day
from tests.integration.http_gear import Serving, serving

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WARM_UP_S = 25

PICTURES = {
    "console-overview": ("/ui", WIDE, False),
    "console-queue": ("/ui/queues/orders", WIDE, False),
    "console-message": ("/ui/queues/orders/messages/orders.dlq-0-0", WIDE, False),
    "console-dead": ("/ui/queues/orders/dead", WIDE, True),
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


def wait(server: Serving) -> None:
    """A worker with nothing to do."""
    server.post("/v1/queues/reports/dequeue", {"wait": -1, "owner": "reports-worker-1"})


def take(browser: Browser, server: Serving) -> None:
    for name, (path, size, dark) in PICTURES.items():
        with visiting(browser, server.url + path, size=size, dark=dark) as visit:
            visit.page.screenshot(path=FOLDER / f"{name}.png")


def main() -> None:
    overview.EVERY_S = WARM_UP_S / overview.KEPT  # type: ignore[misc]  # so that the lines are long after a short while
    ending = threading.Event()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "data", whole=True) as server:
        live_a_day(server)
        assert server.request("PUT", "/v1/queues/reports", {}).status == 200
        for _ in range(2):
            threading.Thread(target=wait, args=(server,), daemon=True).start()
        living = threading.Thread(target=live, args=(server, ending))
        living.start()
        try:
            threading.Event().wait(WARM_UP_S)
            with browsing() as browser:
                take(browser, server)
        finally:
            ending.set()
            living.join()


if __name__ == "__main__":
    main()
