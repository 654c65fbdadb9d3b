"""Pages: a template filled with facts, and sent with headers that let nothing else in."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import msgspec

import holdfast
from holdfast.errors import NotFound, NotInstalled
from holdfast.protocol.errors import Fault
from holdfast.server.access.principals import Principal
from holdfast.server.calls import Call
from holdfast.server.console import formatting
from holdfast.server.http.messages import Request, Response
from holdfast.server.routing import Routes

if TYPE_CHECKING:
    from jinja2 import Environment


# With this header a caller wants pages without acts: one that relays them, and would refuse the acts.
ONLY_LOOKS: Final = "holdfast-only-looks"
HTML: Final = "text/html; charset=utf-8"

# No script, style or picture but our own files; nothing of ours inside a page of somebody else.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SAFE: Final = (
    ("content-security-policy", _POLICY),
    ("referrer-policy", "no-referrer"),
)
_PAGE_HEADERS: Final = (*SAFE, ("cache-control", "no-store"))


@cache
def environment() -> Environment:
    """Templates that escape everything that they are given."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise NotInstalled("the console needs jinja2; run: pip install 'holdfast[server]'") from None
    made = Environment(
        loader=PackageLoader("holdfast.server.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "age": formatting.age,
        "count": formatting.count,
        "size": formatting.size,
        "rate": formatting.rate,
        "moment": formatting.moment,
        "told": formatting.told,
        "part": lambda text: quote(str(text), safe=""),
        "query": lambda facts: urlencode({name: value for name, value in facts.items() if value not in (None, "")}),
    }
    return made


def render(call: Call, template: str, *, status: int = 200, **facts: Any) -> Response:
    """A page as an answer."""
    principal = call.principal
    if call.request.header(ONLY_LOOKS):
        principal = msgspec.structs.replace(principal, read_only=True)
        facts |= {name: dict.fromkeys(facts[name], False) for name in ("may_here", "may_seek") if name in facts}
    if principal.may("read"):
        facts["tokens_problem"] = call.service.tokens_problem()
    text = page_text(principal, call.service.world.clock.now_ns(), call.request.path, template, facts)
    return Response(status, text.encode("utf-8", "replace"), HTML, headers=list(_PAGE_HEADERS))


def page_text(principal: Principal | None, now_ns: int, path: str, template: str, facts: dict[str, Any]) -> str:
    """The page for one who may do some things and not others."""
    may = {
        action: principal is not None and principal.may_any(action)
        for action in ("publish", "consume", "read", "admin", "lock")
    }
    return (
        environment()
        .get_template(template)
        .render(
            who="" if principal is None else principal.name,
            read_only=principal is not None and principal.read_only,
            may=may,
            may_read_all=principal is not None and principal.may("read"),
            version=holdfast.__version__,
            now_ns=now_ns,
            now=datetime.fromtimestamp(now_ns / 1e9, UTC),
            path=path,
            **{"tokens_problem": ""} | facts,
        )
    )


def error_page(request: Request, status: int, fault: Fault) -> Response | None:
    """What went wrong in making a page, told as a page to those who asked for one."""
    wants = request.path.startswith("/ui") and "text/html" in request.header("accept")
    if not wants or fault.code == NotInstalled.code:
        return None
    facts = {"number": status, "code": fault.code, "message": fault.message}
    text = page_text(None, 0, request.path, "error.html", facts)
    return Response(status, text.encode("utf-8", "replace"), HTML, headers=list(_PAGE_HEADERS))


# The files that go with the pages: styles, scripts, the icon.


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
