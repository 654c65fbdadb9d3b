"""A server as it is run feeds every metric of HTTP: none is there only to be looked at."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import aio
from holdfast.env import real_world
from holdfast.server.server import make_server
from holdfast.settings import ServerSettings
from tests.tidy import markdown
from tests.tidy.repo import ROOT

ENQUEUE = "/v1/queues/{queue}/enqueue"


class Client:
    """Calls on connections of their own, in the loop of the server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._place = parts.hostname, parts.port

    async def begin(
        self, method: str, path: str, body: Any = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._place)
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return reader, writer

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        reader, writer = await self.begin(method, path, body)
        status = int((await reader.readline()).split()[1])
        content = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        return status, content

    async def metrics(self) -> dict[str, float]:
        """All values of the metrics of HTTP, by name and labels."""
        status, content = await self.call("GET", "/metrics")
        assert status == 200
        return {
            " ".join([sample.name.removeprefix("holdfast_http_"), *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(content.decode())
            for sample in family.samples
            if family.name.startswith("holdfast_http_")
        }

    async def until(self, name: str, value: float) -> None:
        async with asyncio.timeout(20):
            while (await self.metrics()).get(name) != value:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Client]:
    async with aio.open_broker(folder) as broker:
        server = make_server(real_world(), broker._port, ServerSettings(port=0, drain_ms=0, **settings))
        addresses = await server.listen(None)
        try:
            yield Client(addresses[0])
        finally:
            await server.close()


def test_every_metric_of_http_moves_on_a_server_as_it_is_run(tmp_path: Path):
    async def story() -> None:
        async with serving(tmp_path / "data", max_header_bytes=1024) as client:
            for queue in ("orders", "empty"):
                assert (await client.call("PUT", f"/v1/queues/{queue}", {}))[0] in (200, 201)
            body = base64.b64encode(b"pizza").decode()
            status, _ = await client.call("POST", "/v1/queues/orders/enqueue", {"body": body})
            assert status in (200, 201)
            found = await client.metrics()
            assert found[f"requests_total POST {ENQUEUE} {status}"] == 1
            assert found[f"request_seconds_count POST {ENQUEUE}"] == 1
            assert found[f"received_bytes_total {ENQUEUE}"] == len(json.dumps({"body": body}))
            assert found[f"sent_bytes_total {ENQUEUE}"] > 0
            assert found["connections_total"] == 4
            assert found["open_connections"] == 1

            _, writer = await client.begin("POST", "/v1/queues/orders/subscribe", {"prefetch": 1})
            await client.until("streams /v1/queues/{queue}/subscribe", 1)
            await client.until("windows_unsettled", 1)
            assert (await client.metrics())["sent_bytes_total /v1/queues/{queue}/subscribe"] > 0
            writer.close()
            await client.until("streams /v1/queues/{queue}/subscribe", 0)

            _, writer = await client.begin("POST", "/v1/queues/empty/dequeue", {"wait": 60})
            await client.until("waiting", 1)
            writer.close()
            await client.until("waiting", 0)

            assert (await client.call("GET", "/" + "x" * 5000))[0] >= 400
            found = await client.metrics()
            assert any(name.startswith("refused_connections_total") and value for name, value in found.items())
            await client.until("open_connections", 1)

    asyncio.run(story())


def test_every_metric_of_a_server_is_in_the_reference(tmp_path: Path):
    written = markdown.code((ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8"))

    async def names() -> set[str]:
        async with serving(tmp_path / "data") as client:
            _, content = await client.call("GET", "/metrics")
            return {family.name for family in text_string_to_metric_families(content.decode())}

    ours = {name for name in asyncio.run(names()) if name.startswith("holdfast_")}
    assert len(ours) > 50
    assert {name for name in ours if f"{name}" not in written} == set()


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yaml"])
def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are(name: str):
    text = (ROOT / "docs" / "how-to" / "watch-the-server" / name).read_text("utf-8")
    written = set(re.findall(r"holdfast_\w+", markdown.code((ROOT / "docs/reference/metrics.md").read_text("utf-8"))))
    asked = {re.sub(r"_(total|bucket|sum|count)$", "", found) for found in re.findall(r"holdfast_\w+", text)}
    assert asked - written == set()
    assert len(asked) > 8
