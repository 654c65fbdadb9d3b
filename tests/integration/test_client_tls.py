"""Who the server is, and who we are, as the client sees it: certificates and tokens, right and wrong."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import holdfast
from holdfast import InvalidRequest, Unauthenticated, Unavailable, aio
from holdfast.env import ManualClock
from holdfast.server.callers import tls_context
from holdfast.server.tokens import TokenEntry, digest_of, with_entry
from holdfast.settings import BrokerSettings, ServerSettings
from tests.integration.http_gear import Serving, serving
from tests.unit.certificates import Issuer

OURS, OTHERS = Issuer("ours"), Issuer("others")
SOON_S = 10  # far below the time-out of a call: it was not tried again and again


class Place:
    """The files of a server, and those of its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock(0)
        self.ours, self.others = OURS.write(folder / "ours.pem"), OTHERS.write(folder / "others.pem")
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        self.replace(OURS)

    def replace(self, issuer: Issuer, name: str = "127.0.0.1") -> None:
        new = self.folder / "new"
        new.mkdir(exist_ok=True)
        certificate, key = issuer.issue(new, "server", name)
        shutil.move(certificate, self.certificate)
        shutil.move(key, self.key)

    @contextmanager
    def serving(self, *, mutual: bool = False, **more: Any) -> Iterator[Serving]:
        files = {"tls_cert_file": str(self.certificate), "tls_key_file": str(self.key)}
        if mutual:
            files["tls_client_ca_file"] = str(self.ours)
        context = tls_context(ServerSettings(**files), self.clock)
        with serving(self.folder / "data", tls=context, **files, **more) as server:
            yield server

    def context(self, issuer: Issuer | None = None) -> ssl.SSLContext:
        """One that trusts us, with a certificate of its own, and is as strict as Python is from 3.13 on."""
        context = ssl.create_default_context(cafile=self.ours)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if issuer is not None:
            clients = self.folder / "clients"
            clients.mkdir(exist_ok=True)
            context.load_cert_chain(*issuer.issue(clients, "shop"))
        return context


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def topics(url: str, **options: Any) -> list[str]:
    with holdfast.connect(url, **options) as broker:
        return broker.topics()


def topics_of_a_task(url: str, **options: Any) -> list[str]:
    async def story() -> list[str]:
        async with aio.connect(url, **options) as broker:
            return await broker.topics()

    return asyncio.run(story())


Asked = Callable[..., list[str]]


@pytest.fixture(params=[topics, topics_of_a_task], ids=["threads", "tasks"])
def ask(request: pytest.FixtureRequest) -> Asked:
    """A call that raises at once, where it raises."""

    def asked(url: str, **options: Any) -> list[str]:
        began = time.monotonic()
        try:
            found: list[str] = request.param(url, **options)
            return found
        finally:
            assert time.monotonic() - began < SOON_S

    return asked


def test_a_server_of_a_trusted_issuer_is_spoken_with(place: Place, ask: Asked):
    with place.serving() as server:
        assert server.url.startswith("https://")
        assert ask(server.url, tls=place.ours) == []
        assert ask(server.url, tls=str(place.ours)) == []
        assert ask(server.url, tls=place.context()) == []


def test_a_server_of_another_issuer_is_refused_at_once(place: Place, ask: Asked):
    with place.serving() as server:
        with pytest.raises(Unauthenticated, match=r"not proved its identity.*Nothing was sent"):
            ask(server.url, tls=place.others)
        with pytest.raises(Unauthenticated, match=r"tls="):
            ask(server.url)


def test_a_certificate_that_only_strict_checks_refuse_is_told_of_with_what_it_lacks(place: Place, ask: Asked):
    careless = Issuer("ours", careless=True)
    place.ours = careless.write(place.folder / "ours.pem")
    place.replace(careless)
    with (
        place.serving() as server,
        pytest.raises(Unauthenticated, match=r"authority key identifier.*Secure the server"),
    ):
        ask(server.url, tls=place.context())


def test_a_server_of_another_name_is_refused_at_once(place: Place, ask: Asked):
    place.replace(OURS, "queue.example.org")
    with place.serving() as server, pytest.raises(Unauthenticated, match=r"127\.0\.0\.1"):
        ask(server.url, tls=place.ours)


def test_a_server_without_tls_is_refused_at_once(place: Place, ask: Asked):
    with serving(place.folder / "data") as server, pytest.raises(Unauthenticated, match="TLS"):
        ask(server.url.replace("http:", "https:"), tls=place.ours)


def test_a_file_that_is_no_certificate_is_refused(place: Place):
    (place.folder / "empty.pem").write_text("nothing")
    for path in ("empty.pem", "missing.pem"):
        with pytest.raises(InvalidRequest, match="certificates to trust"):
            holdfast.connect("https://localhost", tls=place.folder / path)
    with pytest.raises(InvalidRequest, match="use https"):
        holdfast.connect("http://localhost", tls=place.ours)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_a_server_that_asks_for_a_certificate_gets_ours(place: Place, ask: Asked, version: ssl.TLSVersion):
    right, none, wrong = place.context(OURS), place.context(), place.context(OTHERS)
    for context in (right, none, wrong):
        context.maximum_version = version
    with place.serving(mutual=True) as server:
        assert ask(server.url, tls=right) == []
        for context in (none, wrong):
            # The server hangs up without a reason, as one does that goes: it is tried again, and the error says both.
            with pytest.raises(Unavailable, match="client certificate"):
                ask(server.url, tls=context, timeout=2)


def test_a_token_is_asked_for_and_the_answer_says_what_is_wrong(place: Place, ask: Asked, monkeypatch: Any):
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    tokens = place.folder / "tokens.toml"
    entry = TokenEntry(name="shop", sha256=digest_of("hf_right"), role="reader")
    tokens.write_text(with_entry("", entry, "t"))
    tokens.chmod(0o600)
    with place.serving(tokens_file=str(tokens)) as server:
        assert ask(server.url, tls=place.ours, token="hf_right") == []
        with pytest.raises(Unauthenticated, match="token is not known"):
            ask(server.url, tls=place.ours, token="hf_wrong")
        with pytest.raises(Unauthenticated, match="asks for a token"):
            ask(server.url, tls=place.ours)
        monkeypatch.setenv("HOLDFAST_TOKEN", "hf_right")
        assert ask(server.url, tls=place.ours) == []
    with pytest.raises(InvalidRequest, match="holdfast token new"):
        holdfast.connect("http://localhost", token="hf_\n")


def test_a_certificate_that_is_replaced_disturbs_nobody_who_trusts_both(place: Place):
    both = place.folder / "both.pem"
    both.write_text(place.ours.read_text() + place.others.read_text())
    with place.serving() as server, holdfast.connect(server.url, tls=both) as broker:
        assert broker.topics() == []
        place.replace(OTHERS)
        place.clock.advance(seconds=1)
        assert broker.topics() == []
        assert topics(server.url, tls=both) == []
        with pytest.raises(Unauthenticated):
            topics(server.url, tls=place.ours)


def test_large_bodies_leases_and_idle_connections_work_over_tls(place: Place):
    with place.serving() as server, holdfast.connect(server.url, tls=place.ours) as broker:
        queue = broker.queue("jobs")
        queue.put_stream(iter([b"x" * (1 << 20)] * 3))
        with queue.get(timeout=5, renew=True) as message:
            assert sum(map(len, message.chunks())) == 3 << 20
        assert queue.stats().ready == 0


def test_a_server_that_is_gone_is_unavailable_and_not_a_stranger(place: Place):
    with place.serving() as server:
        url = server.url
    with pytest.raises(Unavailable, match=str(urlsplit(url).port)):
        topics(url, tls=place.ours, timeout=0.2)


def test_tasks_of_spark_read_and_write_over_tls_with_the_certificates_of_the_environment(
    place: Place, monkeypatch: Any
):
    pytest.importorskip("pyspark")
    from pyspark.sql.datasource import CaseInsensitiveDict

    from holdfast.client.spark_commits import routes
    from holdfast.spark.places import access_of
    from holdfast.spark.readers import BatchReader, message_schema
    from holdfast.spark.source import HoldfastSink, Task, WriteOptions
    from tests.unit.sinks import batch_of

    monkeypatch.setenv("HOLDFAST_TLS_CA", str(place.ours))
    with place.serving(mutual=True, more=lambda: [routes]) as server:
        with holdfast.connect(server.url, tls=place.context(OURS)) as broker:
            broker.create_topic("orders")
        given = CaseInsensitiveDict({"path": server.url, "topic": "orders"})
        certificate, key = OURS.issue(place.folder / "clients", "spark")
        monkeypatch.setenv("HOLDFAST_TLS_CERT", str(certificate))
        monkeypatch.setenv("HOLDFAST_TLS_KEY", str(key))
        options = WriteOptions(
            path=server.url, topic="orders", new_partitions=None, owner_wait_ms=0, settings=BrokerSettings(),
            server=access_of(given),
        )  # fmt: skip
        writer = HoldfastSink(options)
        writer.commit([writer.stage(iter([batch_of([b"a", b"b"])]), "query", 0, Task(0, 0))], kept=True)
        reader = BatchReader(given, message_schema(metadata=False, headers=False))
        splits = reader.partitions()
        sent = pickle.dumps((reader, splits))
        for name in ("CA", "CERT", "KEY"):
            monkeypatch.delenv(f"HOLDFAST_TLS_{name}")  # an executor is told by the driver
        task, splits = pickle.loads(sent)
        rows = [row for split in splits for batch in task.read(split) for row in batch.to_pylist()]
        assert [row["value"] for row in rows] == [b"a", b"b"]
        with pytest.raises(Unauthenticated, match="not proved its identity"):
            BatchReader(given, message_schema(metadata=False, headers=False)).partitions()
