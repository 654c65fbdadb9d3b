"""Identifies callers by token or certificate. A server that only this machine can reach needs neither."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from holdfast.env import World
from holdfast.env.disk import file_facts
from holdfast.env.world import Clock
from holdfast.errors import BadSettings, Forbidden, HoldfastError, Unauthenticated
from holdfast.server.http.messages import parse_host
from holdfast.server.tokens import LOCAL, Principal, TokenEntry, Tokens, principal_of, read_tokens
from holdfast.settings import ServerSettings

if TYPE_CHECKING:
    from holdfast.server.http.messages import Request
    from holdfast.server.service import Call


# Cross-site requests: a page of another site can make its visitor's browser call this server. It could reach a server
# on the visitor's machine that needs no token, or use the token that the visitor entered in the console. Browsers send
# the origin of such requests. Other clients send none and are not affected.

KEPT_HOSTS: Final = 64  # a server has few names, and every call sends one
_SCHEMES: Final = ("http://", "https://")
_OWN_SITE: Final = frozenset({"same-origin", "none"})  # none: the user typed the address or used a bookmark


@lru_cache(maxsize=KEPT_HOSTS)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    name = plain_name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def plain_name(host: str) -> str:
    """A host name or address in the form used for comparison."""
    return host.lower().removesuffix(".").strip("[]")


def check_origin(origin: str, host: str) -> None:
    """Raise Forbidden for a request from a page of another site. The origin `null` could be any page."""
    if not origin:
        return
    place = _origin_place(origin)
    if place is None or place != _host_place(host):
        raise Forbidden(
            f"a page of {origin!r} sent this call to {host!r}: only pages of this server may; "
            "a proxy in between must pass on the Host header unchanged"
        )


def check_host(host: str, names: Collection[str]) -> None:
    """Raise Forbidden if Host is not a name of this server.

    Otherwise a page of another site whose DNS name points here (DNS rebinding) would count as one of ours.
    """
    if not host:
        return
    found = parse_host(host)
    name = "" if found is None else plain_name(found[0])
    if not is_loopback(name) and name not in names:
        known = ", ".join(("localhost", *sorted(names)))
        raise Forbidden(
            f"this server responds only as {known}, not as {host!r}. Call it by one of these, or add the name to "
            "allowed_hosts in [server] (--allowed-host)"
        )


def check_fetch(request: Request, *, page: bool) -> None:
    """Raise Forbidden for a fetch by a page of another site. Following a link to one of our pages is allowed.

    Another port on this machine counts as another site: what runs there is not this server.
    """
    if request.header("sec-fetch-site") in _OWN_SITE:
        return
    navigates = request.header("sec-fetch-mode") == "navigate" and request.header("sec-fetch-dest") == "document"
    if page and navigates and request.method in ("GET", "HEAD"):
        return
    raise Forbidden(
        "a page of another site made this request, and only pages of this server may: open the console directly"
    )


@lru_cache(maxsize=KEPT_HOSTS)
def _origin_place(origin: str) -> tuple[str, int | None] | None:
    scheme = next((each for each in _SCHEMES if origin.lower().startswith(each)), None)
    return None if scheme is None else _host_place(origin[len(scheme) :])


def _host_place(host: str) -> tuple[str, int | None] | None:
    """The host and port of a Host header or origin, without a default port; None if it is not valid."""
    found = parse_host(host)
    if found is None:
        return None
    name, port = found
    return name, None if port in (80, 443) else port


# Programs send the token as it is; browsers ask the user for it as a password. Each challenge is sent in its own
# header, because browsers read only the first challenge of a header.
CHALLENGES: Final = ('Basic realm="holdfast", charset="UTF-8"', 'Bearer realm="holdfast"')

# The scripts of the console send this header: they say on the page that the token is no longer accepted, and the
# browser must not ask for a password on top of it again and again. A stream of events cannot send headers.
_OF_SCRIPTS: Final = "x-requested-with"
_EVENTS: Final = "text/event-stream"


def challenges_for(request: Request) -> tuple[str, ...]:
    """How a caller without a valid token may sign in."""
    is_script = bool(request.header(_OF_SCRIPTS)) or request.header("accept") == _EVENTS
    return CHALLENGES[1:] if is_script else CHALLENGES


_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
_HOW: Final = 'set HOLDFAST_TOKEN, or send "Authorization: Bearer TOKEN", or send the token as the password of any user'


def check_listening(settings: ServerSettings) -> list[str]:
    """Raise BadSettings if the server would be open to others by accident. Returns warnings."""
    if settings.tls_cert_file is None and (settings.tls_key_file or settings.tls_client_ca_file):
        raise BadSettings(
            "tls_key_file and tls_client_ca_file need tls_cert_file (--tls-cert): without a certificate there is no TLS"
        )
    for name in settings.allowed_hosts:
        if _host_name(name) is None:
            raise BadSettings(
                f"allowed_hosts has {name!r}, which is not a host name: write a name or an address without a port, "
                'such as "queue.example" or "10.0.0.5"'
            )
    if is_loopback(settings.host):
        return []
    asks = settings.tokens_file is not None or settings.tls_client_ca_file is not None
    if not asks and not settings.allow_anonymous_network:
        raise BadSettings(
            f"the server would listen on {settings.host}, where others could reach it, without asking for credentials. "
            "Name a tokens_file (--tokens; `holdfast token new` creates one), or a tls_client_ca_file "
            "(--tls-client-ca); "
            "or listen at 127.0.0.1; or, to let everybody there do everything, set allow_anonymous_network "
            "(--allow-anonymous-network) and allowed_hosts (--allowed-host)"
        )
    if not asks and not settings.allowed_hosts:
        raise BadSettings(
            "allow_anonymous_network needs allowed_hosts (--allowed-host): the names and addresses by which callers "
            'reach this server, such as "queue.internal" or "10.0.0.5". Without them, any web page '
            "that a caller opens could use the server under its own host name"
        )
    if not asks:
        return [f"everybody who reaches {settings.host} may do everything: allow_anonymous_network is set"]
    if settings.tls_cert_file is None:
        return ["tokens and messages cross the network readable by others: set tls_cert_file, or put a proxy in front"]
    return []


class Access:
    """Identifies callers, or refuses them."""

    def __init__(self, settings: ServerSettings, world: World) -> None:
        self._settings = settings
        self._clock = world.clock
        self._tokens: Reloaded[Tokens] | None = None
        if settings.tokens_file is not None:
            path = settings.tokens_file
            self._tokens = Reloaded([path], lambda: read_tokens(world, path), world.clock, what="tokens")
        self._confirmed_by: Tokens | None = None
        self._confirmed: frozenset[TokenEntry] = frozenset()
        self._local = Principal(name=LOCAL, read_only=settings.read_only)
        self.is_open: Final = self._tokens is None and settings.tls_client_ca_file is None  # callers are not identified
        self._checks_host = self.is_open or bool(settings.allowed_hosts)
        names = frozenset(
            found
            for found in map(_host_name, (settings.host, *settings.allowed_hosts))
            if found is not None and found not in _EVERY_ADDRESS
        )
        # The allowed names never change, so a host that passed the check once need not be checked again.
        self._check_host = lru_cache(maxsize=KEPT_HOSTS)(partial(check_host, names=names))

    def principal(self, request: Request) -> Principal:
        """The caller of a request. Raises Forbidden or Unauthenticated if it is refused."""
        return self.caller(request.headers, request.peer, request.certificate)

    def caller(self, headers: Mapping[str, str], peer: str, certificate: Mapping[str, Any] | None) -> Principal:
        """The caller with these headers, on the connection of this peer. Raises Forbidden or Unauthenticated."""
        host = headers.get("host", "")
        if headers.get("origin"):
            check_origin(headers["origin"], host)
        if peer == LOCAL:
            return self._local
        if self._checks_host:
            self._check_host(host)
        if self.is_open:
            return self._local
        return self.identify(headers.get("authorization", ""), names_in(certificate))

    def identify(self, authorization: str, certificate_names: Sequence[str] = ()) -> Principal:
        """The caller with this token or, without one, this certificate. Raises Unauthenticated if it is unknown."""
        if self.is_open:
            return self._local
        if self._tokens is None:  # every certificate of that issuer has all rights
            if not certificate_names:
                raise Unauthenticated(
                    "the server asks for a client certificate with a name, and none was sent: send one that has a "
                    "common name"
                )
            return Principal(name=certificate_names[0], read_only=self._settings.read_only)
        return self._of_entry(self._entry(self._tokens.current(), authorization, certificate_names))

    def tokens_problem(self) -> str:
        """Why the tokens file cannot be used, so that its previous content still applies; empty if it can be used."""
        if self._tokens is None:
            return ""
        self._tokens.current()
        return self._tokens.problem

    def confirm(self, principal: Principal) -> None:
        """Raise Unauthenticated if the token was revoked, restricted or expired since the call began."""
        if principal.entry is None or self._tokens is None:
            return
        tokens = self._tokens.current()
        entry: TokenEntry | None = principal.entry
        if tokens is not self._confirmed_by:
            self._confirmed_by, self._confirmed = tokens, frozenset(tokens.entries)
        if entry not in self._confirmed:
            entry = next((each for each in tokens.entries if _is_same_caller(each, principal.entry)), None)
            if entry is None or not _allows_all_of(entry, principal.entry):
                raise Unauthenticated(
                    f"the token of {principal.name} was changed or revoked during the call, so the call was "
                    "ended; call again, with what the token still allows or with another one"
                )
        self._of_entry(entry)

    def _entry(self, tokens: Tokens, authorization: str, certificate_names: Sequence[str]) -> TokenEntry:
        if authorization:
            entry = tokens.of_token(_token_in(authorization))
            if entry is None:
                raise Unauthenticated(
                    "the token is not known here: check HOLDFAST_TOKEN, or ask for a new one (`holdfast token new` "
                    "creates it)"
                )
            return entry
        entry = tokens.of_certificate(certificate_names)
        if entry is not None:
            return entry
        if certificate_names:
            raise Unauthenticated(
                f"no entry of the tokens file has certificate = {certificate_names[0]!r}; add one, or {_HOW}"
            )
        raise Unauthenticated(f"the server asks for a token; {_HOW}")

    def _of_entry(self, entry: TokenEntry) -> Principal:
        if entry.has_expired(self._clock.now_ns()):
            raise Unauthenticated(f"the token of {entry.name} expired at {entry.expires}; ask for a new one")
        return principal_of(entry, read_only=self._settings.read_only)


def _is_same_caller(entry: TokenEntry, other: TokenEntry) -> bool:
    return (entry.sha256, entry.certificate) == (other.sha256, other.certificate)


def _allows_all_of(entry: TokenEntry, before: TokenEntry) -> bool:
    """Whether a changed entry still allows everything it did. Its expiry is checked elsewhere."""
    if not entry.actions >= before.actions:
        return False
    for field in TokenEntry.__struct_fields__:
        now, then = getattr(entry, field), getattr(before, field)
        if now == then or field in ("name", "role", "expires"):
            continue
        if isinstance(now, bool):
            if then:
                return False
        elif not (isinstance(now, tuple) and isinstance(then, tuple) and set(now) >= set(then)):
            return False
    return True


def _host_name(text: str) -> str | None:
    """A host name or address in the form used for comparison; None for anything else, such as one with a port."""
    found = parse_host(f"[{text}]" if ":" in text and not text.startswith("[") else text)
    return None if found is None or found[1] is not None else plain_name(found[0])


def _token_in(authorization: str) -> str:
    scheme, _, rest = authorization.strip().partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip()
        case "basic":
            try:
                return base64.b64decode(rest.strip(), validate=True).decode("utf-8").partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                raise Unauthenticated(f"the Authorization header is not valid for Basic; {_HOW}") from None
        case _:
            raise Unauthenticated(f"the Authorization header has an unknown scheme; {_HOW}")


# Revocation: calls in progress end when their token is revoked, restricted or expires.
#
# The token is checked when a call begins, but a call may last for minutes. So the calls of all callers with an entry in
# the tokens file are registered here while they run, and checked a few times a second. A call that is no longer allowed
# is cancelled as if its client had disconnected, which every handler must support anyway: its messages are given back.
# If its answer has not begun, the caller gets the reason as an error (see `ServerApp.handle`).
#
# A token may also be revoked between two checks, so a call that has waited confirms its caller again before it hands
# out messages.

_LOOK_EVERY_S: Final = 0.25


class Revocation:
    """The calls in progress of callers with a token. Ends each when its token is revoked or expires."""

    def __init__(self, confirm: Callable[[Principal], None]) -> None:
        self._confirm = confirm
        self._calls: set[Call] = set()
        self._looks = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Register a call that begins, or whose streamed answer begins."""
        self._calls.add(call)
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)

    def remove(self, call: Call) -> None:
        """Remove a call that has ended."""
        self._calls.discard(call)

    def _look_again(self) -> None:
        self._looks = bool(self._calls)
        if self._looks:
            asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)
            self.look()

    def look(self) -> None:
        """End the calls whose callers are no longer allowed. Each caller is checked once, however many calls it has."""
        refusals: dict[int, HoldfastError | None] = {}
        for call in list(self._calls):
            principal = call.principal
            if id(principal) not in refusals:
                refusals[id(principal)] = self._refusal(principal)
            refusal = refusals[id(principal)]
            if refusal is not None:
                self._calls.discard(call)
                call.end(refusal)

    def _refusal(self, principal: Principal) -> HoldfastError | None:
        try:
            self._confirm(principal)
        except HoldfastError as error:
            return error
        return None


# Tokens and TLS files are read again when they change. A broken file never replaces one that works.

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

LOOK_EVERY_MS: Final = 1_000


class Reloaded(Generic[_T]):
    """A value loaded from files, and loaded again when they change. They are checked at most once a second."""

    def __init__(self, files: Sequence[str], load: Callable[[], _T], clock: Clock, *, what: str) -> None:
        self._files = files
        self._load = load
        self._clock = clock
        self._what = what
        # Before the files are read, so that a change during the read is noticed at the next check.
        self._facts = self._look()
        self._looked_ns = clock.monotonic_ns()
        self._value = load()
        self.problem = ""  # why the files cannot be used as they are now

    def current(self) -> _T:
        """The current value. If the files have changed and cannot be used, the value before."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns >= LOOK_EVERY_MS * 1_000_000:
            self._looked_ns = now_ns
            facts = self._look()
            if facts != self._facts or self.problem:  # the failure may have been temporary, such as too many open files
                self._facts = facts
                self._reload()
        return self._value

    def _look(self) -> list[object]:
        return [file_facts(path) for path in self._files]

    def _reload(self) -> None:
        facts = {"what": self._what, "files": list(self._files)}
        try:
            self._value = self._load()
        except HoldfastError as error:
            if str(error) != self.problem:  # logged once
                _log.error(
                    "a changed file cannot be used; its previous content stays in effect: %s", error, extra=facts
                )
            self.problem = str(error)
        else:
            self.problem = ""
            _log.info("%s reloaded", self._what, extra=facts)


def tls_context(settings: ServerSettings, clock: Clock) -> ssl.SSLContext | None:
    """The TLS context to listen with; None if no certificate is set.

    A server keeps the context that it was started with. But the context calls back at the start of each handshake, and
    the callback may switch that connection to a newer context.
    """
    if settings.tls_cert_file is None:
        return None
    wanted = (settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    files = [path for path in wanted if path is not None]
    newest = Reloaded(files, lambda: _context(settings), clock, what="TLS files")
    first = newest.current()

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = newest.current()

    first.sni_callback = choose
    return first


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names in a certificate from `getpeercert`: the common name, then the alternative names."""
    if not certificate:
        return ()
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for kind, value in subject if kind == "commonName"]
    names += [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "email")]
    return tuple(dict.fromkeys(name for name in names if name))


def _context(settings: ServerSettings) -> ssl.SSLContext:
    assert settings.tls_cert_file is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # A resumed session would keep the result of an earlier check of the client's certificate.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    key = settings.tls_key_file or settings.tls_cert_file
    facts = file_facts(key)
    if facts is not None and (facts.others_may_read or facts.others_may_write):
        raise BadSettings(f"other users may read or change the key {key} (mode {facts.mode:04o}): run chmod 600 {key}")
    try:
        # Without this, OpenSSL would ask for a passphrase at the terminal and wait.
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password=_refuse_passphrase)
        if settings.tls_client_ca_file is not None:
            context.load_verify_locations(settings.tls_client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise BadSettings(f"TLS cannot be set up from {_named(settings)}: {_explained(str(reason))}") from None
    return context


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase, and the server cannot ask for it: remove the passphrase")


def _named(settings: ServerSettings) -> str:
    wanted = (settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    return ", ".join(path for path in wanted if path is not None)


def _explained(reason: str) -> str:
    """An OpenSSL error, in plain words for the usual mistakes."""
    meanings = {
        "KEY_VALUES_MISMATCH": "the key does not match the certificate",
        "NO_START_LINE": "a file is not PEM",
        "PEM lib": "a file is not PEM, or holds no certificate or no key",
    }
    return next((meaning for word, meaning in meanings.items() if word in reason), reason)
