"""The files that go with the pages: styles, scripts, the icon."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Final

from holdfast.errors import NotFound
from holdfast.server.calls import Call
from holdfast.server.console.rendering import SAFE
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes

routes = Routes("console")

_MEDIA: Final = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@cache
def _found() -> dict[str, tuple[bytes, str, str]]:
    """All of them, once read: content, media type, and a mark that changes with the content."""
    made = {}
    for each in files("holdfast.server.console").joinpath("static").iterdir():
        media = _MEDIA.get(each.name.rpartition(".")[2])
        if media is not None:
            content = each.read_bytes()
            made[each.name] = content, media, f'"{blake2b(content, digest_size=8).hexdigest()}"'
    return made


@routes.add("GET", "/", action="read", scope="any", hidden=True)
async def start(call: Call) -> Response:
    """Whoever types in nothing but the server's address wants the pages."""
    return Response(303, headers=[*SAFE, ("location", "/ui")])


@routes.add("GET", "/ui/static/{file}", action="open", hidden=True)
async def static(call: Call) -> Response:
    """A file of the console; they hold nothing of anybody's messages."""
    found = _found().get(call.path["file"])
    if found is None:
        raise NotFound(f"the console has no file {call.path['file']}")
    content, media, mark = found
    headers = [*SAFE, ("cache-control", "no-cache"), ("etag", mark)]
    if call.request.header("if-none-match") == mark:
        return Response(304, headers=headers)
    return Response(200, content, media, headers=headers)
