"""The API's own description: for programs, and for people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec

from holdfast.errors import NotInstalled
from holdfast.protocol.media import JSON
from holdfast.server.calls import Call
from holdfast.server.http.messages import Response
from holdfast.server.routing import Route, Routes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def description_routes(all_routes: Callable[[], Sequence[Route]]) -> Routes:
    """What describes these routes, and itself; made when it is first asked for."""
    routes = Routes("description")

    @cache
    def described() -> dict[str, Any]:
        from holdfast.server.openapi import document

        return document(all_routes())

    @cache
    def page() -> bytes:
        try:
            from holdfast.server.docs_page import page
        except ImportError:  # the owner of a shared folder may be without it
            raise NotInstalled("this page needs jinja2; run: pip install 'holdfast[server]'") from None

        return page(described()).encode()

    @routes.add("GET", "/openapi.json", action="open", gives=(JSON,))
    async def openapi(call: Call) -> Response:
        """This description, as an OpenAPI document."""
        content = msgspec.json.encode(await asyncio.to_thread(described))
        return Response(200, content, JSON, headers=[("cache-control", "no-cache")])

    @routes.add("GET", "/docs", action="open", hidden=True)
    async def docs(call: Call) -> Response:
        """The same for people."""
        content = await asyncio.to_thread(page)
        headers = [("cache-control", "no-cache"), ("content-security-policy", _POLICY)]
        return Response(200, content, "text/html; charset=utf-8", headers=headers)

    return routes
