"""Rendering of pages: templates, security headers, static files, and numbers and times as people read them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote, urlencode

import msgspec

import holdfast
from holdfast.api.schedules import Schedule
from holdfast.delivery.where import headline
from holdfast.errors import NotFound, NotInstalled
from holdfast.large import LargeValue
from holdfast.protocol.media import MSGPACK, Fault
from holdfast.server.http.messages import Request, Response
from holdfast.server.routing import Action, Handler, Routes
from holdfast.server.service import Call
from holdfast.server.tokens import Principal
from holdfast.settings import ServerSettings

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


# A read-only relay sends this header to get pages without forms and buttons, since it would refuse what they do.
ONLY_LOOKS: Final = "holdfast-only-looks"
HTML: Final = "text/html; charset=utf-8"

# Scripts, styles and images only from our own files; our pages not inside frames of other sites.
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
    """The template environment, with autoescape. Raises NotInstalled without jinja2."""
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
        finalize=visible,
    )
    made.filters |= {
        "age": age,
        "count": count,
        "size": size,
        "rate": rate,
        "moment": moment,
        "timing": timing,
        "value_text": value_text,
        "reason": reason,
        "headline": headline,
        "sentence": sentence,
        "with_code": with_code,
        "part": lambda text: quote(str(text), safe=""),
        "query": lambda facts: urlencode({name: value for name, value in facts.items() if value not in (None, "")}),
    }
    return made


def render(call: Call, template: str, *, status: int = 200, **facts: Any) -> Response:
    """An answer with a page."""
    principal = call.principal
    if call.request.header(ONLY_LOOKS):
        principal = msgspec.structs.replace(principal, read_only=True)
        rights = [name for name in ("may_here", "may_seek", "may_order", "may_change") if name in facts]
        facts |= {name: dict.fromkeys(facts[name], False) for name in rights}
    if principal.may("read"):
        facts["tokens_problem"] = call.service.tokens_problem()
    now_ns = call.service.world.clock.now_ns()
    facts["is_cluster"] = call.service.is_shard
    text = page_text(principal, call.service.settings, now_ns, call.request.path, template, facts)
    content = text.encode("utf-8", "replace")
    etag = _etag(text, now_ns)
    headers = [*_PAGE_HEADERS, ("etag", etag)]
    if status == 200 and call.request.header("if-none-match") == etag:
        return Response(304, headers=headers)
    return Response(status, content, HTML, headers=headers)


# What changes because time passes: how long ago something was, which a browser works out for itself; when the page was
# made; and small charts of the last minutes, which move to the left.
_AGE: Final = re.compile(r"<time\b[^>]*>[^<]*</time>")
_NOTE: Final = re.compile(r'<span id="live-note"[^>]*>[^<]*</span>')
_SLIDING: Final = re.compile(r'<svg class="spark.*?</svg>', re.DOTALL)
_SLIDES_NS: Final = 60_000_000_000  # a small chart in which nothing new happens is drawn again after this long


def _etag(text: str, now_ns: int) -> str:
    """The same for two pages that differ in nothing but the time that has passed."""
    lasting = _NOTE.sub("", _AGE.sub(lambda found: found[0].partition(">")[0], text))
    pictures, lasting = _SLIDING.findall(lasting), _SLIDING.sub("", lasting)
    if any(map(_is_drawn, pictures)):
        lasting += str(now_ns // _SLIDES_NS)
    return f'"{blake2b(lasting.encode("utf-8", "replace"), digest_size=8).hexdigest()}"'


def _is_drawn(picture: str) -> bool:
    return "points=" in picture or "<rect" in picture


def base_of(call: Call) -> str:
    """The address of this server, as the browser knows it."""
    return f"{'https' if call.request.encrypted else 'http'}://{call.request.header('host') or 'localhost'}"


class NavigationLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link at the top of every page. `key` leads there after `g`."""

    href: str
    label: str
    key: str
    is_here: bool


def navigation(
    principal: Principal | None, settings: ServerSettings, path: str, *, is_cluster: bool = False
) -> list[NavigationLink]:
    """The pages that the caller may see: the same list on every page, also on one that shows an error."""

    def may(action: Action) -> bool:
        return principal is not None and principal.may_any(action)

    may_read_all = principal is not None and principal.may("read")
    listed: list[tuple[str, str, str, bool]] = [
        ("/ui", "Queues", "o", True),
        ("/ui/groups", "Groups", "g", True),
        ("/ui/workers", "Workers", "w", True),
        ("/ui/schedules", "Schedules", "s", may("read")),
        ("/ui/pipelines", "Pipelines", "p", settings.lake is not None and may_read_all),
        ("/ui/locks", "Locks", "l", may("lock")),
        ("/ui/cluster", "Cluster", "c", is_cluster and may_read_all),
        ("/ui/health", "Health", "h", may_read_all),
        ("/ui/audit", "Audit", "a", may("admin")),
    ]
    return [
        NavigationLink(href=href, label=label, key=key, is_here=_is_at(path, href))
        for href, label, key, shown in listed
        if shown
    ]


def _is_at(path: str, href: str) -> bool:
    return path.rstrip("/") == href or path.startswith("/ui/queues" if href == "/ui" else href)


def page_text(
    principal: Principal | None, settings: ServerSettings, now_ns: int, path: str, template: str, facts: dict[str, Any]
) -> str:
    """The text of a page, with the controls that the caller may use."""
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
            navigation=navigation(principal, settings, path, is_cluster=facts.get("is_cluster", False)),
            version=holdfast.__version__,
            now_ns=now_ns,
            now=datetime.fromtimestamp(now_ns / 1e9, UTC),
            path=path,
            **{"tokens_problem": "", "searched_text": "", "is_cluster": False} | facts,
        )
    )


def error_page(
    request: Request,
    status: int,
    fault: Fault,
    identify: Callable[[Request], Principal | None],
    settings: ServerSettings,
    *,
    is_cluster: bool = False,
) -> Response | None:
    """An error as a page, if the request was for one; otherwise None. It links to the pages that the caller may see."""
    wants = request.path.startswith("/ui") and "text/html" in request.header("accept")
    if not wants or fault.code == NotInstalled.code:
        return None
    asked = unquote(request.path.rstrip("/").rpartition("/")[2]) if status == 404 else ""
    facts = {"number": status, "code": fault.code, "message": fault.message, "asked": asked, "is_cluster": is_cluster}
    text = page_text(identify(request), settings, 0, request.path, "error.html", facts)
    return Response(status, text.encode("utf-8", "replace"), HTML, headers=list(_PAGE_HEADERS))


routes = Routes("console")


def page(pattern: str, *, action: Action = "read", **facts: Any) -> Callable[[Handler], Handler]:
    """Make the function the handler of a page of the console."""
    return routes.add("GET", pattern, action=action, hidden=True, **facts)


class Spanning(NamedTuple):
    """A page about all topics: the type of its facts, and what makes the page of them."""

    kind: Any
    show: Callable[[Call, Any], Response]


SPANNING: Final[dict[str, Spanning]] = {}


def spanning_page(
    pattern: str, kind: Any, show: Callable[[Call, Any], Response], *, on: Routes = routes, **facts: Any
) -> Callable[[Callable[[Call], Awaitable[Any]]], Callable[[Call], Awaitable[Any]]]:
    """Make the function the source of what a page shows, and `show` the page.

    In a cluster each shard answers with its facts, as MessagePack, and a node puts them together before it shows them.
    """
    SPANNING[pattern] = Spanning(kind, show)

    def made(gather: Callable[[Call], Awaitable[Any]]) -> Callable[[Call], Awaitable[Any]]:
        async def handler(call: Call) -> Response:
            found = await gather(call)
            return call.answer(found) if call.media == MSGPACK else show(call, found)

        handler.__doc__ = gather.__doc__
        on.add("GET", pattern, hidden=True, **{"action": "read", **facts})(handler)
        return gather

    return made


_MEDIA: Final = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@cache
def _found() -> dict[str, tuple[bytes, str, str]]:
    """The static files by name: content, media type and ETag."""
    made = {}
    for each in files("holdfast.server.console").joinpath("static").iterdir():
        media = _MEDIA.get(each.name.rpartition(".")[2])
        if media is not None:
            content = each.read_bytes()
            made[each.name] = content, media, f'"{blake2b(content, digest_size=8).hexdigest()}"'
    return made


@page("/", scope="any")
async def start(call: Call) -> Response:
    """Redirect the server's bare address to the console."""
    return Response(303, headers=[*SAFE, ("location", "/ui")])


@page("/ui/static/{file}", action="open")
async def static(call: Call) -> Response:
    """A style sheet, script or icon. It contains no data, so it needs no token."""
    found = _found().get(call.path["file"])
    if found is None:
        raise NotFound(f"the console has no file {call.path['file']}")
    content, media, mark = found
    headers = [*SAFE, ("cache-control", "no-cache"), ("etag", mark)]
    if call.request.header("if-none-match") == mark:
        return Response(304, headers=headers)
    return Response(200, content, media, headers=headers)


View: TypeAlias = Literal["json", "text", "hex"]

SHOWN_BYTES: Final = 64 * 1024  # bytes of a body on a page; the whole body can be downloaded
PREVIEW_BYTES: Final = 160

_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60))
_LINE: Final = 16
_CONTROLS: Final = frozenset(map(chr, [*range(9), 11, 12, *range(14, 32), 127]))


# Control characters, which nobody sees, and those that turn the direction of text around, so that it reads as another.
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def visible(value: object) -> object:
    """A text with its invisible characters written as escapes: \\u202e; anything else as it is."""
    if isinstance(value, str) and _UNSEEN.search(value):
        return type(value)(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value))
    return value


def count(number: int) -> str:
    """A number with thousands separators."""
    return f"{number:,}"


def size(number: float) -> str:
    """A number of bytes, with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" or number >= 100 else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def rate(number: float) -> str:
    """A number per second."""
    if number == 0:
        return "0/s"
    return f"{number:,.0f}/s" if number >= 100 else f"{number:.1f}/s" if number >= 0.1 else "<0.1/s"


def age(seconds: float) -> str:
    """A duration in its largest fitting unit."""
    if seconds < 0:
        return "-" + age(-seconds)
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,.0f} s"


_REASONS: Final = {"MAX_ATTEMPTS": "out of attempts", "REJECTED": "rejected", "EXPIRED": "expired"}


def reason(code: str) -> str:
    """Why a message died, in words."""
    return _REASONS.get(code, code)


def value_text(value: object) -> str:
    """A setting or an argument: a string as it is, anything else as JSON."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


def sentence(text: str) -> str:
    """An error message as a sentence. One of several lines ends with an explanation, which is none."""
    is_ended = "\n" in text or text.endswith((".", "!", "?"))
    return text[:1].upper() + text[1:] + ("" if is_ended else ".")


def with_code(text: str) -> Markup:
    """A text in which `commands` in backticks are shown as code."""
    from markupsafe import Markup, escape

    parts = [escape(visible(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:  # one of them has no partner
        return escape(visible(text))
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def moment(value: datetime | int) -> str:
    """A time in UTC to the millisecond, from a datetime or from nanoseconds."""
    found = datetime.fromtimestamp(value / 1e9, UTC) if isinstance(value, int) else value.astimezone(UTC)
    return f"{found:%Y-%m-%d %H:%M:%S}.{found.microsecond // 1000:03d}Z"


def timing(schedule: Schedule) -> str:
    """When a schedule is due, in a few words."""
    if schedule.cron is not None:
        return schedule.cron if schedule.timezone == "UTC" else f"{schedule.cron} {schedule.timezone}"
    if schedule.every:
        return f"every {age(schedule.every)}"
    return "once" if schedule.at is None else f"once, {moment(schedule.at)}"


class ShownPayload(msgspec.Struct, frozen=True, kw_only=True):
    """A body as it is shown: the view, the views it has, and whether the body was cut."""

    view: View
    views: tuple[View, ...]
    text: str
    size: int
    cut: bool


def beginning(value: bytes | LargeValue, most: int) -> bytes:
    """The first bytes of a body."""
    return value[:most] if isinstance(value, bytes) else value.first(most)


def payload(value: bytes | LargeValue, wanted: View | None = None, *, most: int = SHOWN_BYTES) -> ShownPayload:
    """A body in the wanted view if it has that, otherwise as JSON, as text or as hex: the first that fits."""
    start, length = beginning(value, most), len(value)
    cut = length > len(start)
    texts: dict[View, str] = {}
    pretty = None if cut else _pretty(start)
    if pretty is not None:
        texts["json"] = pretty
    text = as_text(start, cut=cut)
    if text is not None:
        texts["text"] = text
    view: View = wanted if wanted in texts or wanted == "hex" else next(iter(texts), "hex")
    return ShownPayload(
        view=view,
        views=(*texts, "hex"),
        text=texts[view] if view in texts else dump(start),
        size=length,
        cut=cut,
    )


def preview(value: bytes | LargeValue) -> str:
    """The start of a body in one line."""
    start = beginning(value, PREVIEW_BYTES)
    text = as_text(start, cut=len(value) > len(start))
    line = " ".join(text.split()) if text is not None else start[:40].hex(" ")
    return f"{line}…" if len(value) > len(start) or (text is None and len(start) > 40) else line


def plain(value: str | bytes | None) -> str:
    """A key or a header as text; bytes that are not text as hex."""
    if value is None:
        return ""
    return value if isinstance(value, str) else as_text(value) or f"0x{value.hex()}"


def as_text(content: bytes, *, cut: bool = False) -> str | None:
    """Bytes as text; None if they are not. With `cut`, an incomplete last character is dropped."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if not cut or error.start < len(content) - 3:
            return None
        text = content[: error.start].decode("utf-8")
    return None if _CONTROLS.intersection(text) else text


def dump(content: bytes) -> str:
    """A hex dump with an ASCII column."""
    lines = []
    for place in range(0, len(content), _LINE):
        some = content[place : place + _LINE]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in some)
        lines.append(f"{place:08x}  {some.hex(' '):<47}  {letters}")
    return "\n".join(lines)


def _pretty(content: bytes) -> str | None:
    if content.strip()[:1] not in (b"{", b"["):
        return None
    try:
        msgspec.json.decode(content)
        return msgspec.json.format(content, indent=2).decode("utf-8")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
