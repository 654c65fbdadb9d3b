"""TLS from files that may be replaced while the server runs. Each new connection uses the current ones."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from holdfast.env.disk import file_facts
from holdfast.env.world import Clock
from holdfast.errors import BadSettings, HoldfastError
from holdfast.settings import ServerSettings

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
