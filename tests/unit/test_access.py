"""Who is calling, what they may do, and where a server may listen at all."""

from __future__ import annotations

import base64
import errno
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.env import ManualClock, World, real_world
from holdfast.env.disk import RealDisk
from holdfast.env.world import SeededIds
from holdfast.errors import BadSettings, Forbidden, Unauthenticated
from holdfast.server import tokens as tokens_module
from holdfast.server.callers import Access, check_listening
from holdfast.server.tokens import ACTIONS, ROLES, Patterns, Principal, TokenEntry, digest_of, principal_of, with_entry
from holdfast.settings import ServerSettings

SHOP = TokenEntry(name="shop", sha256=digest_of("t1"), role="producer", topics=("orders", "orders.*"))
OPS = TokenEntry(name="ops", sha256=digest_of("t2"), certificate="ops.example", role="admin")
BRIEF = TokenEntry(name="brief", sha256=digest_of("t3"), role="reader", expires=datetime(2030, 1, 1, tzinfo=UTC))
YEAR_2029_NS = 1_861_920_000_000_000_000


class Asked:
    """A request, as far as it says who sent it."""

    def __init__(self, peer: str = "127.0.0.1", certificate: Any = None, **headers: str) -> None:
        self.peer = peer
        self.certificate = certificate
        self.headers = {"host": "127.0.0.1:7700"} | headers


class Place:
    """A tokens file, and a server's access that follows it by a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.toml"
        self.clock = ManualClock(YEAR_2029_NS)
        self.world = World(clock=self.clock, disk=RealDisk(), ids=SeededIds())

    def write(self, *entries: TokenEntry) -> None:
        text = "tokens = []\n"
        for entry in entries:
            text = with_entry(text, entry, "tokens.toml")
        self.write_text(text)

    def write_text(self, text: str) -> None:
        self.path.touch(mode=0o600)
        self.path.write_text(text)

    def access(self, **settings: Any) -> Access:
        return Access(ServerSettings(tokens_file=str(self.path), **settings), self.world)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def refusal(access: Access, authorization: str = "", names: tuple[str, ...] = ()) -> str:
    with pytest.raises(Unauthenticated) as refused:
        access.identify(authorization, names)
    return str(refused.value)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_role_allows_its_actions_and_no_others(role: str, action: Any):
    principal = principal_of(TokenEntry(name="x", sha256="0" * 64, role=role))
    if action in ROLES[role]:
        principal.check(action, "orders")
        principal.check(action)
        principal.check_any(action)
        return
    for check in (
        lambda: principal.check(action, "orders"),
        lambda: principal.check(action),
        lambda: principal.check_any(action),
    ):
        with pytest.raises(Forbidden):
            check()


def test_a_refusal_says_who_what_where_and_what_is_allowed_instead():
    principal = principal_of(SHOP)
    principal.check("publish", "orders.eu")
    with pytest.raises(Forbidden) as refused:
        principal.check("publish", "payments")
    assert str(refused.value) == (
        "shop does not have the right 'publish' on the topic 'payments'; "
        "the token allows publish on topics orders, orders.*"
    )
    with pytest.raises(Forbidden, match="shop does not have the right 'consume' on the topic 'orders'"):
        principal.check("consume", "orders")
    with pytest.raises(Forbidden, match="shop does not have the right 'lock' on the lock 'a'"):
        principal.check("lock", "a")


def test_a_call_about_everything_needs_a_token_for_everything():
    limited, unlimited = principal_of(SHOP), principal_of(OPS)
    unlimited.check("admin")
    with pytest.raises(Forbidden, match="shop does not have the right 'publish' on every topic"):
        limited.check("publish")
    limited.check_any("publish")
    assert [name for name in ("orders", "orders.eu", "payments") if limited.sees(name)] == ["orders", "orders.eu"]


def test_dead_letters_belong_to_their_topic():
    triage = principal_of(TokenEntry(name="x", sha256="0" * 64, role="reader", topics=("payments",)))
    triage.check("read", "payments.dlq")
    with pytest.raises(Forbidden):
        triage.check("read", "payments.eu.dlq")


def test_locks_have_patterns_of_their_own():
    worker = principal_of(TokenEntry(name="w", sha256="0" * 64, role=("consume", "lock"), topics=("a",), locks=("b",)))
    worker.check("consume", "a")
    worker.check("lock", "b")
    for action, name in (("consume", "b"), ("lock", "a")):
        with pytest.raises(Forbidden):
            worker.check(action, name)


def test_without_locks_the_patterns_for_topics_count():
    admin = principal_of(TokenEntry(name="a", sha256="0" * 64, role="admin", topics=("a.*",)))
    admin.check("lock", "a.deploy")
    for name in ("deploy", "b.deploy", None):
        with pytest.raises(Forbidden):
            admin.check("lock", name)
    principal_of(TokenEntry(name="a", sha256="0" * 64, role="admin")).check("lock")


def test_groups_and_producers_are_those_of_the_topics_where_nothing_else_is_said():
    team = principal_of(TokenEntry(name="a", sha256="0" * 64, role="admin", topics=("a.*",)))
    team.check_group("a.readers")
    team.check_producer("a.writer")
    with pytest.raises(
        Forbidden, match=r"may not use the stream group 'b\.readers'; the token allows the groups a\.\*"
    ):
        team.check_group("b.readers")
    with pytest.raises(Forbidden, match=r"may not be the producer 'b\.writer'; the token allows the producers a\.\*"):
        team.check_producer("b.writer")
    team.check_queue_group("anything")  # it stands inside a topic, which is guarded


def test_listed_groups_and_producers_count_instead_of_the_topics():
    entry = TokenEntry(name="a", sha256="0" * 64, role="admin", topics=("a.*",), groups=("g",), producers=("p",))
    team = principal_of(entry)
    team.check_group("g")
    team.check_producer("p")
    for group in (None, "default", "g"):
        team.check_queue_group(group)
    for check, name in (
        (team.check_group, "a.readers"),
        (team.check_producer, "a.writer"),
        (team.check_queue_group, "x"),
    ):
        with pytest.raises(Forbidden):
            check(name)
    assert team.allowed().endswith("use the groups g and be the producers p")


def test_a_consumer_makes_groups_only_if_the_operator_says_so():
    plain = principal_of(TokenEntry(name="c", sha256="0" * 64, role="consumer"))
    with pytest.raises(Forbidden) as refused:
        plain.check_creates_group("new", "orders")
    for words in (
        "there is no group 'new' on the topic 'orders'",
        "create_groups",
        "--create-groups",
        "PUT /v1/topics",
    ):
        assert words in str(refused.value)
    maker = principal_of(TokenEntry(name="c", sha256="0" * 64, role="consumer", create_groups=True))
    maker.check_creates_group("new", "orders")
    assert maker.allowed() == "consume, read on topics * and create groups"
    principal_of(OPS).check_creates_group("new")
    Principal(name="local").check_creates_group("new")


def test_what_is_open_is_open_to_everybody():
    Principal(name="x", actions=frozenset()).check("open")
    principal_of(SHOP).check("open", "payments")


def test_a_read_only_server_lets_even_its_administrator_only_look(place: Place):
    place.write(OPS)
    for principal in (
        place.access(read_only=True).identify("Bearer t2"),
        Access(ServerSettings(read_only=True), place.world).identify(""),
    ):
        principal.check("read", "orders")
        for action in set(ACTIONS) - {"read"}:
            with pytest.raises(Forbidden, match="this server is read-only"):
                principal.check(action, "orders")


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer t1",
        "bearer t1",
        "Bearer  t1 ",
        basic("anybody:t1"),
        basic(":t1"),
        basic("anybody:t1").replace("B", "b", 1),
    ],
)
def test_a_token_comes_as_it_is_or_as_a_password(place: Place, authorization: str):
    place.write(SHOP, OPS)
    assert place.access().identify(authorization).name == "shop"


@pytest.mark.parametrize(
    ("authorization", "words"),
    [
        ("", 'the server asks for a token; set HOLDFAST_TOKEN, or send "Authorization: Bearer TOKEN"'),
        ("Bearer t9", "the token is not known here"),
        ("Bearer", "the token is not known here"),
        ("Bearer t1 t1", "the token is not known here"),
        (basic("t1:"), "the token is not known here"),
        (basic("t1"), "the token is not known here"),
        ("Basic ***", "is not valid for Basic"),
        ("Basic /w==", "is not valid for Basic"),
        ("Digest t1", "has an unknown scheme"),
        ("t1", "has an unknown scheme"),
        (f"Bearer {digest_of('t1')}", "the token is not known here"),
    ],
)
def test_without_a_token_that_holds_nobody_comes_in(place: Place, authorization: str, words: str):
    place.write(SHOP)
    reason = refusal(place.access(), authorization)
    assert words in reason
    assert digest_of("t1") not in reason


def test_no_refusal_repeats_what_was_sent(place: Place):
    place.write(SHOP)
    for authorization in ("Bearer hunter2", basic("x:hunter2"), "Digest hunter2", "hunter2"):
        assert "hunter2" not in refusal(place.access(), authorization)


def test_a_token_ends_when_it_expires(place: Place):
    place.write(BRIEF)
    access = place.access()
    principal = access.identify("Bearer t3")
    place.clock.advance(ms=int(BRIEF.expires.timestamp() * 1000) - YEAR_2029_NS // 1_000_000 - 1)
    access.confirm(principal)
    place.clock.advance(ms=1)
    assert "the token of brief expired at 2030-01-01" in refusal(access, "Bearer t3")
    with pytest.raises(Unauthenticated):
        access.confirm(principal)


def test_a_changed_file_counts_within_a_second_and_a_broken_one_does_not(
    place: Place, caplog: pytest.LogCaptureFixture
):
    place.write(SHOP)
    access = place.access()
    shop = access.identify("Bearer t1")
    place.write(OPS)
    place.clock.advance(seconds=1)
    assert access.identify("Bearer t2").name == "ops"
    refusal(access, "Bearer t1")
    with pytest.raises(Unauthenticated, match="was changed or revoked"):
        access.confirm(shop)
    with caplog.at_level(logging.ERROR):
        for broken in ("", "[[tokens]]\nname = 3", "[[tok"):
            place.write_text(broken)
            place.clock.advance(seconds=1)
            assert access.identify("Bearer t2").name == "ops"
            place.clock.advance(seconds=1)
            access.identify("Bearer t2")  # told once
        place.path.unlink()
        place.clock.advance(seconds=1)
        assert access.identify("Bearer t2").name == "ops"
    assert len(caplog.records) == 4
    assert all("its previous content stays in effect" in record.message for record in caplog.records)
    place.write()
    place.clock.advance(seconds=1)
    refusal(access, "Bearer t2")


def test_a_file_put_in_the_place_of_the_old_one_counts_though_its_times_are_the_same(place: Place):
    place.write(SHOP)
    access = place.access()
    before = place.path.stat()
    other = place.path.with_suffix(".new")
    other.touch(mode=0o600)
    other.write_text(place.path.read_text().replace(SHOP.sha256, OPS.sha256))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(place.path)
    place.clock.advance(seconds=1)
    assert access.identify("Bearer t2").name == "shop"


def test_a_file_that_others_may_read_stops_a_server_at_its_start_only(place: Place, caplog: pytest.LogCaptureFixture):
    place.write(SHOP)
    access = place.access()
    place.path.chmod(0o644)
    with pytest.raises(BadSettings, match="run chmod 600"):
        place.access()
    place.clock.advance(seconds=1)
    assert access.identify("Bearer t1").name == "shop"
    assert "run chmod 600" in caplog.text


def test_a_certificate_is_looked_up_by_its_names(place: Place):
    place.write(SHOP, OPS)
    access = place.access()
    assert access.identify("", ("someone", "ops.example")).name == "ops"
    assert access.identify("Bearer t1", ("ops.example",)).name == "shop"  # what is said goes before what is shown
    assert "no entry of the tokens file has certificate = 'someone'" in refusal(access, "", ("someone",))


def test_without_a_tokens_file_every_certificate_of_the_issuer_is_trusted(place: Place):
    settings = ServerSettings(tls_cert_file="c", tls_client_ca_file="ca")
    access = Access(settings, place.world)
    principal = access.identify("", ("ops.example",))
    principal.check("admin")
    assert principal.name == "ops.example"
    assert "client certificate" in refusal(access)


def test_a_unix_socket_and_an_open_server_on_loopback_trust_everybody(place: Place):
    place.write(SHOP)
    for principal in (
        place.access().principal(Asked(peer="local")),
        Access(ServerSettings(), place.world).principal(Asked()),
        Access(ServerSettings(), place.world).principal(Asked(authorization="Bearer whatever")),
    ):
        assert principal.name == "local"
        for action in ACTIONS:
            principal.check(action)
    with pytest.raises(Unauthenticated):
        place.access().principal(Asked())


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:8080", "http://localhost:7700", "null", "http://[", "x"]
)
def test_pages_of_other_sites_are_refused_even_with_a_token(place: Place, origin: str):
    place.write(OPS)
    for access in (place.access(), Access(ServerSettings(), place.world)):
        for peer in ("127.0.0.1", "local"):
            with pytest.raises(Forbidden, match="only pages of this server may"):
                access.principal(Asked(peer=peer, origin=origin, authorization="Bearer t2"))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:7700", "127.0.0.1:7700"),
        ("https://queue.example", "queue.example"),
        ("https://queue.example", "queue.example:443"),
        ("https://Queue.Example:8443", "queue.example:8443"),
        ("http://[::1]:7700", "[::1]:7700"),
    ],
)
def test_pages_of_this_server_are_welcome(place: Place, origin: str, host: str):
    place.write(OPS)
    assert place.access().principal(Asked(origin=origin, host=host, authorization="Bearer t2")).name == "ops"


def test_an_open_server_answers_only_under_its_own_names(place: Place):
    access = Access(ServerSettings(), place.world)
    for host in ("localhost:7700", "127.0.0.1:7700", "[::1]:7700", "127.8.8.8", "app.localhost", "LOCALHOST.", ""):
        assert access.principal(Asked(host=host)).name == "local"
    for host in ("evil.example:7700", "10.0.0.1", "127.0.0.1.evil.example", "localhost@evil.example", "["):
        with pytest.raises(Forbidden, match="this server responds only as localhost, 127"):
            access.principal(Asked(host=host))
    assert Access(ServerSettings(host="box"), place.world).principal(Asked(host="BOX:7700")).name == "local"
    anybody = ServerSettings(
        host="0.0.0.0", allow_anonymous_network=True, allowed_hosts=("Queue.example", "10.0.0.5", "fd00::7")
    )
    access = Access(anybody, place.world)
    for host in ("queue.example", "QUEUE.example.:7700", "10.0.0.5:7700", "[fd00::7]:7700", "localhost"):
        assert access.principal(Asked(peer="10.0.0.9", host=host)).name == "local"
    for host in ("evil.example", "10.0.0.6", "0.0.0.0", "queue.example.evil.example", "x@queue.example"):
        with pytest.raises(Forbidden, match="add the name to allowed_hosts"):
            access.principal(Asked(peer="10.0.0.9", host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "LOCALHOST"])
def test_loopback_needs_no_tokens(host: str):
    assert check_listening(ServerSettings(host=host)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "queue.example", "fe80::1", "127.0.0.1.evil.example"])
def test_other_addresses_need_somebody_to_be_known(host: str):
    with pytest.raises(BadSettings) as refused:
        check_listening(ServerSettings(host=host))
    for words in (host, "tokens_file", "tls_client_ca_file", "127.0.0.1", "allow_anonymous_network"):
        assert words in str(refused.value)
    assert check_listening(ServerSettings(host=host, tokens_file="t", tls_cert_file="c")) == []
    assert check_listening(ServerSettings(host=host, tls_cert_file="c", tls_client_ca_file="ca")) == []
    (warning,) = check_listening(ServerSettings(host=host, tokens_file="t"))
    assert "readable by others" in warning
    with pytest.raises(BadSettings, match="allow_anonymous_network needs allowed_hosts"):
        check_listening(ServerSettings(host=host, allow_anonymous_network=True))
    (warning,) = check_listening(ServerSettings(host=host, allow_anonymous_network=True, allowed_hosts=("q.example",)))
    assert "may do everything" in warning


@pytest.mark.parametrize("name", ["queue.example:7700", "http://queue.example", "*", "a b", "x@y", "[::1"])
def test_allowed_hosts_are_names_and_addresses(name: str):
    with pytest.raises(BadSettings, match="not a host name: write a name or an address without a port"):
        check_listening(ServerSettings(allowed_hosts=("queue.example", name)))


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.write(SHOP)
    access = place.access()
    place.write(OPS)

    def too_many(*_: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as failing:
        failing.setattr(tokens_module, "read_file", too_many)
        place.clock.advance(seconds=1)
        assert access.identify("Bearer t1").name == "shop"
        assert "Too many open files" in access.tokens_problem()
    place.clock.advance(seconds=1)
    assert access.identify("Bearer t2").name == "ops"
    assert access.tokens_problem() == ""


@pytest.mark.parametrize("name", ["tls_key_file", "tls_client_ca_file"])
def test_tls_begins_with_a_certificate(name: str):
    with pytest.raises(BadSettings, match="need tls_cert_file"):
        check_listening(ServerSettings(**{name: "x"}))


def test_a_tokens_file_that_is_not_there_stops_the_server(tmp_path: Path):
    with pytest.raises(BadSettings, match="there is no tokens file"):
        Access(ServerSettings(tokens_file=f"{tmp_path}/none"), real_world())


def test_a_host_that_was_let_in_before_lets_in_no_other_and_one_refused_stays_so(place: Place):
    access = Access(ServerSettings(), place.world)
    for _ in range(3):
        assert access.principal(Asked(host="localhost:7700")).name == "local"
        with pytest.raises(Forbidden):
            access.principal(Asked(host="localhost.evil.example:7700"))
        with pytest.raises(Forbidden):
            access.principal(Asked(host="localhost:7700", origin="http://evil.example:7700"))


def test_rights_on_everything_are_those_of_the_entry_and_none_of_a_read_only_server():
    assert Principal(name="local").everywhere == frozenset(ACTIONS)
    assert Principal(name="local", read_only=True).everywhere == {"read"}
    assert Principal(name="x", topics=Patterns(["a*"])).everywhere == {"lock"}
