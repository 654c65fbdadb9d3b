"""Identifies callers by token or by certificate; a server that only this machine can reach asks for neither."""

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
from holdfast.server.access.tokens import LOCAL, Principal, TokenEntry, Tokens, principal_of, read_tokens
from holdfast.server.http.messages import parse_host
from holdfast.settings import ServerSettings

if TYPE_CHECKING:
    from holdfast.server.http.messages import Request
    from holdfast.server.service import Call


# Web pages of other sites: a browser sends their requests, too, and with them what it knows of the user.
#
# A page could reach a server on its visitor's own machine, which asks nobody for a token, or use the token that the
# visitor typed into the console. Browsers say which page a request is from; programs say nothing, and are not
# concerned.


KEPT_HOSTS: Final = 64  # a server goes by few names, and every call says one
_SCHEMES: Final = ("http://", "https://")
_OWN_SITE: Final = frozenset({"same-origin", "none"})  # none: the user asked for it, by hand or by a bookmark


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
    """A name or an address as it is compared."""
    return host.lower().removesuffix(".").strip("[]")


def check_origin(origin: str, host: str) -> None:
    """Refuse a request from a page of another site. The origin `null` could be any page."""
    if not origin:
        return
    place = _origin_place(origin)
    if place is None or place != _host_place(host):
        raise Forbidden(
            f"a page of {origin!r} sent this call to {host!r}: only pages of this server may; "
            "a proxy in between must leave the Host header as it is"
        )


def check_host(host: str, names: Collection[str]) -> None:
    """Refuse a Host that is not ours: with a DNS name that points here, a page of another site would count as ours."""
    if not host:
        return
    found = parse_host(host)
    name = "" if found is None else plain_name(found[0])
    if not is_loopback(name) and name not in names:
        known = ", ".join(("localhost", *sorted(names)))
        raise Forbidden(
            f"this server answers only as {known}, not as {host!r}. Call it by one of these, or add the name to "
            "allowed_hosts in [server] (--allowed-host)"
        )


def check_fetch(request: Request, *, page: bool) -> None:
    """Refuse what a page of another site fetches. A link to one of our pages is allowed.

    Another port of this machine is another site here, too: whatever runs there is not this server.
    """
    if request.header("sec-fetch-site") in _OWN_SITE:
        return
    navigates = request.header("sec-fetch-mode") == "navigate" and request.header("sec-fetch-dest") == "document"
    if page and navigates and request.method in ("GET", "HEAD"):
        return
    raise Forbidden("a page of another site asked for this: only pages of this server may")


@lru_cache(maxsize=KEPT_HOSTS)
def _origin_place(origin: str) -> tuple[str, int | None] | None:
    scheme = next((each for each in _SCHEMES if origin.lower().startswith(each)), None)
    return None if scheme is None else _host_place(origin[len(scheme) :])


def _host_place(host: str) -> tuple[str, int | None] | None:
    """Host and port; default ports are left out."""
    found = parse_host(host)
    if found is None:
        return None
    name, port = found
    return name, None if port in (80, 443) else port


# What an answer to an unknown caller says: programs send the token as it is, browsers ask for it as a password.
# In headers of their own: browsers understand only the first challenge of one.
CHALLENGES: Final = ('Basic realm="holdfast", charset="UTF-8"', 'Bearer realm="holdfast"')

_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
_HOW: Final = 'send "Authorization: Bearer TOKEN", or the token as the password of any user'


def check_listening(settings: ServerSettings) -> list[str]:
    """BadSettings if the server would be open to others by accident. Returns warnings."""
    if settings.tls_cert_file is None and (settings.tls_key_file or settings.tls_client_ca_file):
        raise BadSettings(
            "tls_key_file and tls_client_ca_file need tls_cert_file (--tls-cert): without a certificate there is no TLS"
        )
    for name in settings.allowed_hosts:
        if _host_name(name) is None:
            raise BadSettings(
                f"allowed_hosts has {name!r}, which is no name of a host: write a name or an address without a port, "
                'such as "queue.example" or "10.0.0.5"'
            )
    if is_loopback(settings.host):
        return []
    asks = settings.tokens_file is not None or settings.tls_client_ca_file is not None
    if not asks and not settings.allow_anonymous_network:
        raise BadSettings(
            f"the server would listen at {settings.host}, where others could reach it, and ask nobody who they are. "
            "Name a tokens_file (--tokens; `holdfast token new` makes one), or a tls_client_ca_file (--tls-client-ca); "
            "or listen at 127.0.0.1; or, to let everybody there do everything, set allow_anonymous_network "
            "(--allow-anonymous-network) and allowed_hosts (--allowed-host)"
        )
    if not asks and not settings.allowed_hosts:
        raise BadSettings(
            "allow_anonymous_network needs allowed_hosts (--allowed-host): the names and addresses by which callers "
            'reach this server, such as "queue.internal" or "10.0.0.5". Without them any web page that one of them '
            "looks at could use the server under a name of its own"
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
        self.is_open: Final = self._tokens is None and settings.tls_client_ca_file is None  # nobody is asked for a name
        self._checks_host = self.is_open or bool(settings.allowed_hosts)
        names = frozenset(
            found
            for found in map(_host_name, (settings.host, *settings.allowed_hosts))
            if found is not None and found not in _EVERY_ADDRESS
        )
        # The names are those of the settings for good, so what was let in once need not be looked at again.
        self._check_host = lru_cache(maxsize=KEPT_HOSTS)(partial(check_host, names=names))

    def principal(self, request: Request) -> Principal:
        """The caller of a request."""
        headers = request.headers
        host = headers.get("host", "")
        if headers.get("origin"):
            check_origin(headers["origin"], host)
        if request.peer == LOCAL:
            return self._local
        if self._checks_host:
            self._check_host(host)
        if self.is_open:
            return self._local
        return self.identify(headers.get("authorization", ""), names_in(request.certificate))

    def identify(self, authorization: str, certificate_names: Sequence[str] = ()) -> Principal:
        """The caller with this token, or else with this certificate."""
        if self.is_open:
            return self._local
        if self._tokens is None:  # whoever has a certificate of that issuer is trusted with everything
            if not certificate_names:
                raise Unauthenticated("the server asks for a client certificate that has a name; there was none")
            return Principal(name=certificate_names[0], read_only=self._settings.read_only)
        return self._of_entry(self._entry(self._tokens.current(), authorization, certificate_names))

    def tokens_problem(self) -> str:
        """Why the current tokens file cannot be used, in which case the previous one still applies; empty if it can."""
        if self._tokens is None:
            return ""
        self._tokens.current()
        return self._tokens.problem

    def confirm(self, principal: Principal) -> None:
        """Unauthenticated if the token was revoked or changed since the call began."""
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
                    f"the token of {principal.name} was changed or taken back since the call began, so the call was "
                    "ended; call again, with what the token still allows or with another one"
                )
        self._of_entry(entry)

    def _entry(self, tokens: Tokens, authorization: str, certificate_names: Sequence[str]) -> TokenEntry:
        if authorization:
            entry = tokens.of_token(_token_in(authorization))
            if entry is None:
                raise Unauthenticated("the token is not known here; ask for a new one, `holdfast token new` makes it")
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
    """A name or an address as it is compared; None for anything else, such as one with a port."""
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
                raise Unauthenticated(f"the authorization is not what Basic means; {_HOW}") from None
        case _:
            raise Unauthenticated(f"the authorization is of an unknown kind; {_HOW}")


# Calls that are under way when their token is taken back, changed or expires: they end then, not when they are done.
#
# Whoever calls is asked for a token when the call begins; a call may go on for minutes. So all calls of callers with
# an entry in the tokens file are listed here while they run, and somebody looks at them a few times a second. A call
# whose caller may not go on is cancelled as if its client had gone away, which every handler must bear anyway: what it
# took is given back. Then, where the answer has not begun, the caller is told why (see `ServerApp.handle`).
#
# What comes between two looks is not for the caller either, so whoever waits confirms the caller once more before it
# hands out what it waited for.


_LOOK_EVERY_S: Final = 0.25


class Revocation:
    """Calls in progress whose callers have a token. Each is ended when the token is revoked or expires."""

    def __init__(self, confirm: Callable[[Principal], None]) -> None:
        self._confirm = confirm
        self._calls: set[Call] = set()
        self._looks = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """A call begins, or its answer does."""
        self._calls.add(call)
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)

    def remove(self, call: Call) -> None:
        """The call is over."""
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


# TLS from files that may be replaced while the server runs. Each new connection uses the current ones.


# Files that are read again when they change, while the server runs: a broken one never replaces one that works.


_log = logging.getLogger(__name__)
_T = TypeVar("_T")

LOOK_EVERY_MS: Final = 1_000


class Reloaded(Generic[_T]):
    """What some files say, looked at again at most once a second, when somebody asks."""

    def __init__(self, files: Sequence[str], load: Callable[[], _T], clock: Clock, *, what: str) -> None:
        self._files = files
        self._load = load
        self._clock = clock
        self._what = what
        # The facts go first: a change while the files are read is seen at the next look.
        self._facts = self._look()
        self._looked_ns = clock.monotonic_ns()
        self._value = load()
        self.problem = ""  # why the files, as they are now, cannot be used

    def current(self) -> _T:
        """What holds now. Where the files have changed into something that cannot be used, what held before."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns >= LOOK_EVERY_MS * 1_000_000:
            self._looked_ns = now_ns
            facts = self._look()
            if facts != self._facts or self.problem:  # what failed may have been of the moment: too many open files
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
            if str(error) != self.problem:  # told once
                _log.error("a changed file cannot be used; what it said before still holds: %s", error, extra=facts)
            self.problem = str(error)
        else:
            self.problem = ""
            _log.info("%s were read again", self._what, extra=facts)


def tls_context(settings: ServerSettings, clock: Clock) -> ssl.SSLContext | None:
    """What the server listens with; None where no certificate is set.

    The context that a server was started with cannot be changed under it. But it asks, at the beginning of each
    handshake, under which name it was called, and may then be told to go on with another context.
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
    """The names of a verified client, as `getpeercert` gives them: the common name, then the alternative ones."""
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
    # A resumed session would bring along what was true of the client's certificate when it began.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    key = settings.tls_key_file or settings.tls_cert_file
    facts = file_facts(key)
    if facts is not None and (facts.others_may_read or facts.others_may_write):
        raise BadSettings(f"others may read or change the key {key} (mode {facts.mode:04o}): run chmod 600 {key}")
    try:
        # Nobody is there to be asked for a passphrase; without this, OpenSSL would wait at the terminal.
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password=_refuse_passphrase)
        if settings.tls_client_ca_file is not None:
            context.load_verify_locations(settings.tls_client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise BadSettings(f"TLS cannot be set up from {_named(settings)}: {_told(str(reason))}") from None
    return context


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase; the server has nobody to ask for it, so take it off")


def _named(settings: ServerSettings) -> str:
    wanted = (settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    return ", ".join(path for path in wanted if path is not None)


def _told(reason: str) -> str:
    """OpenSSL's words for the usual mistakes, and what they mean."""
    meanings = {
        "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
        "NO_START_LINE": "a file is not PEM",
        "PEM lib": "a file is not PEM, or holds no certificate or no key",
    }
    return next((meaning for word, meaning in meanings.items() if word in reason), reason)
