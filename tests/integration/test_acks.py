"""`acks` is another name for `durability`, on every face."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.errors import InvalidRequest
from holdfast.model import DURABILITY_OF_ACKS
from tests.integration.http_gear import serving


@pytest.mark.parametrize(("acks", "durability"), list(DURABILITY_OF_ACKS.items()))
def test_the_receipt_says_what_was_reached(tmp_path: Path, acks: Any, durability: str):
    with holdfast.open_broker(tmp_path / "data", share=False) as broker:
        broker.create_topic("jobs")
        queue = broker.queue("jobs")
        stored = [
            queue.put(b"x", acks=acks),
            queue.put(b"x", acks=acks, key="k"),
            *queue.put_many([b"x"], acks=acks),
            queue.put_stream(BytesIO(b"x"), acks=acks),
            broker.publish("jobs", b"x", acks=acks),
            *broker.publish_many("jobs", [b"x"], acks=acks),
            broker.publish_stream("jobs", BytesIO(b"x"), acks=acks),
        ]
        assert [each.durability for each in stored] == [durability] * 7


def test_tasks_have_it_too(tmp_path: Path):
    async def put() -> str:
        async with holdfast.aio.open(tmp_path / "data", share=False) as queue:
            return (await queue.put(b"x", acks="leader")).durability

    assert asyncio.run(put()) == "os"


def test_one_of_the_two_names_is_enough(tmp_path: Path):
    with holdfast.open(tmp_path / "data", share=False) as queue:
        with pytest.raises(InvalidRequest, match="say the same"):
            queue.put(b"x", acks="all", durability="fsync")
        with pytest.raises(InvalidRequest, match="use one of none, leader, all"):
            queue.put(b"x", acks="quorum")  # type: ignore[arg-type]
        assert not queue.qsize()


def test_a_server_takes_it_from_clients_and_as_a_query(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        with holdfast.open(f"{server.url}/jobs") as queue:
            assert queue.put(b"x", acks="leader").durability == "os"
            assert queue.put(b"x", acks="all").durability == "fsync"
        for path, body in (("/v1/queues/jobs/enqueue", b"x"), ("/v1/topics/jobs/messages", {"bodies": ["eA=="]})):
            for acks, durability in DURABILITY_OF_ACKS.items():
                answer = server.request("POST", path, body, query={"acks": acks})
                stored = answer.body["stored"][0] if "stored" in answer.body else answer.body
                assert stored["durability"] == durability, answer
        both = server.request("POST", "/v1/queues/jobs/enqueue", b"x", query={"acks": "all", "durability": "os"})
        assert (both.status, both.code) == (400, "invalid_request")
        wrong = server.request("POST", "/v1/queues/jobs/enqueue", b"x", query={"acks": "quorum"})
        assert (wrong.status, wrong.code) == (400, "invalid_request")
