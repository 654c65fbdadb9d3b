"""The search over all queues, told once for every face: a folder, a server, a folder that another owns."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import InvalidRequest
from tests.integration import test_client_stories
from tests.integration.test_client_stories import done, story

where, place = test_client_stories.where, test_client_stories.place  # fixtures


async def live(broker: Any) -> Any:
    """Two queues, with a message in every phase, and a topic that is no queue. Returns the message in flight."""
    orders = await done(broker.queue("orders"))
    for number in range(6):
        await done(orders.put(b'{"order": %d}' % number, key=f"c-{number % 2}", headers={"tenant": "acme"}))
    await done((await done(orders.get(timeout=10))).ack())
    await done((await done(orders.get(timeout=10))).reject("card declined"))
    held = await done(orders.get(timeout=10, lease=600))
    await done(orders.put(b'{"order": 6}', delay=3600))
    mails = await done(broker.queue("mails"))
    await done(mails.put("Grüße, Order 4".encode()))
    await done(broker.create_topic("clicks"))
    await done(broker.publish("clicks", b'{"order": 4}'))
    return held


def shown(page: Any) -> list[tuple[str, str, str]]:
    return [(message.id, message.phase, group) for message, group in page.messages]


@story
async def test_messages_are_found_in_every_phase(place):
    async with place.broker() as broker:
        held = await live(broker)
        for text, expected in {
            "$.order=0": [("orders-0-0", "done", "default")],
            "$.order=1": [("orders.dlq-0-0", "dead", "default")],
            "$.order=2": [("orders-0-2", "leased", "default")],
            "$.order=3 key=c-1 tenant=acme": [("orders-0-3", "ready", "default")],
            "$.order=6": [("orders-0-d0", "delayed", "default")],
            "orders-0-3": [("orders-0-3", "ready", "default")],
            "order queue=mails": [("mails-0-0", "ready", "default")],
            '"order 4"': [("mails-0-0", "ready", "default")],
            "where holder != '' and reason == ''": [("orders-0-2", "leased", "default")],
            "nothing-has-this": [],
        }.items():
            assert shown(await done(broker.search(text))) == expected, text
        await done(held.ack())


@story
async def test_a_found_message_has_its_content(place):
    async with place.broker() as broker:
        held = await live(broker)
        ((message, _),) = (await done(broker.search("$.order=3"))).messages
        assert (message.body, message.key, message.topic) == (b'{"order": 3}', "c-1", "orders")
        assert message.headers["tenant"] == "acme"
        ((letter, _),) = (await done(broker.search("declined"))).messages
        assert (letter.phase, letter.reason, letter.error) == ("dead", "REJECTED", "card declined")
        assert letter.body == b'{"order": 1}'
        await done(held.ack())


@story
async def test_it_says_what_it_searched(place):
    async with place.broker() as broker:
        held = await live(broker)
        page = await done(broker.search("nothing-has-this"))
        assert [(each.queue, each.searched, each.messages, each.whole) for each in page.queues] == [
            ("mails", 1, 1, True),
            ("orders", 8, 8, True),
        ]
        assert (page.not_queues, page.next, page.left, page.scanned) == (["clicks"], "", [], 9)
        assert "nothing-has-this" in page.where
        await done(held.ack())


@story
async def test_it_goes_on_where_the_page_before_ended(place):
    async with place.broker() as broker:
        held = await live(broker)
        found, after, pages = [], "", 0
        while True:
            page = await done(broker.search("where offset >= 0", limit=2, after=after))
            assert len(page.messages) <= 2
            found += shown(page)
            pages += 1
            if not page.next:
                break
            after = page.next
        assert pages >= 3
        assert {each[0] for each in found} >= {"orders-0-0", "orders-0-2", "orders-0-5", "mails-0-0"}
        assert len(found) == len(set(found))
        await done(held.ack())


@story
async def test_what_cannot_be_understood_is_refused(place):
    async with place.broker() as broker:
        for arguments in (
            {"text": ""},
            {"text": 7},
            {"text": "where ("},
            {"text": "time=never"},
            {"text": "x", "limit": 0},
            {"text": "x", "limit": 1001},
            {"text": "x", "after": "nonsense!"},
            {"text": "x", "after": None},
        ):
            with pytest.raises(InvalidRequest):
                await done(broker.search(**arguments))
