"""Locks that somebody holds, and state documents."""

from __future__ import annotations

import json
from typing import Annotated, Final

from msgspec import Meta

from holdfast.protocol.messages import Wire
from holdfast.server.calls import Call
from holdfast.server.console.rendering import render
from holdfast.server.console.shown import SHOWN_BYTES
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes

routes = Routes("console")

_MOST: Final = 500


class LocksQuery(Wire, kw_only=True):
    """Which locks and documents to show, and the document that is to be seen whole."""

    name: Annotated[str, Meta(max_length=200)] = ""
    document: Annotated[str, Meta(max_length=200)] = ""


@routes.add("GET", "/ui/locks", action="lock", scope="any", query=LocksQuery, hidden=True)
async def locks(call: Call) -> Response:
    """Who holds which lock, and which documents there are."""
    query: LocksQuery = call.query
    broker, may = call.service.broker, call.principal.may
    held = [info for info in await broker.locks.list() if may("lock", info.name) and query.name in info.name]
    names = [name for name in await broker.documents.list() if may("lock", name) and query.name in name]
    document, text = None, ""
    if query.document:
        call.principal.check("lock", query.document)
        document = await broker.documents.get(query.document)
        if document is not None:
            text = json.dumps(document.value, indent=2, ensure_ascii=False)[:SHOWN_BYTES]
    return render(
        call,
        "locks.html",
        query=query,
        held=held[:_MOST],
        names=names[:_MOST],
        left_out=max(len(held) - _MOST, 0) + max(len(names) - _MOST, 0),
        document=document,
        text=text,
    )
