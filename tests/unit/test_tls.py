"""TLS from files: what is accepted, who the client is, and files that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.env import ManualClock
from holdfast.errors import BadSettings
from holdfast.server.callers import names_in, tls_context
from holdfast.server.server import event_loop
from holdfast.settings import ServerSettings
from tests.unit.certificates import Issuer

OURS, OTHERS = Issuer("ours"), Issuer("others")


class Place:
    """The files of one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock(0)
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        self.clients = folder / "clients.pem"
        self.replace(OURS)

    def replace(self, issuer: Issuer) -> None:
        source = self.folder / "new"
        source.mkdir(exist_ok=True)
        certificate, key = issuer.issue(source, "localhost", "localhost", "127.0.0.1")
        shutil.move(certificate, self.certificate)
        shutil.move(key, self.key)

    def settings(self, *, mutual: bool = False) -> ServerSettings:
        return ServerSettings(
            tls_cert_file=str(self.certificate),
            tls_key_file=str(self.key),
            tls_client_ca_file=str(self.clients) if mutual else None,
        )

    def trusting(self, issuer: Issuer, *, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """A client that trusts servers of this issuer, and shows a certificate of its own."""
        context = ssl.create_default_context(cafile=issuer.write(self.folder / "trusted.pem"))
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as every client is from Python 3.13 on
        if client is not None:
            context.load_cert_chain(*client)
        return context


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@asynccontextmanager
async def served(place: Place, *, mutual: bool = False) -> AsyncIterator[int]:
    """A server that answers with the names in the client's certificate; gives its port."""

    open_ones: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.append(writer)
        names = names_in(writer.get_extra_info("peercert"))
        writer.write(f"hello {','.join(names)}\n".encode())
        await writer.drain()
        await reader.read()
        writer.close()

    context = tls_context(place.settings(mutual=mutual), place.clock)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in open_ones:
            writer.transport.abort()  # or the loop could not be closed after a failure


def run(story: Coroutine[Any, Any, None]) -> None:
    """On the loop that servers have."""
    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(story)


async def greeted(port: int, context: ssl.SSLContext) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return (await reader.readline()).decode().strip()
    finally:
        writer.close()


def refused(place: Place, **settings: Any) -> str:
    with pytest.raises(BadSettings) as error:
        tls_context(ServerSettings(**settings), place.clock)
    return str(error.value)


def test_without_a_certificate_there_is_no_tls(place: Place):
    assert tls_context(ServerSettings(), place.clock) is None


def test_a_client_that_trusts_the_issuer_is_served(place: Place):
    async def story() -> None:
        async with served(place) as port:
            assert await greeted(port, place.trusting(OURS)) == "hello"
            with pytest.raises(ssl.SSLError):
                await greeted(port, place.trusting(OTHERS))

    run(story())


def test_nothing_older_than_tls_1_2_is_spoken(place: Place):
    context = tls_context(place.settings(), place.clock)
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_new_connections_have_the_new_certificate_and_a_broken_one_is_not_used(
    place: Place, caplog: pytest.LogCaptureFixture
):
    async def story() -> None:
        async with served(place) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=place.trusting(OURS))
            place.replace(OTHERS)
            place.clock.advance(seconds=1)
            assert await greeted(port, place.trusting(OTHERS)) == "hello"
            with pytest.raises(ssl.SSLError):
                await greeted(port, place.trusting(OURS))
            assert await reader.readline() == b"hello \n"  # who was there already is not disturbed
            writer.close()

            place.key.write_text("no key at all")
            place.clock.advance(seconds=1)
            with caplog.at_level(logging.ERROR):
                assert await greeted(port, place.trusting(OTHERS)) == "hello"
            assert "its previous content stays in effect" in caplog.text
            place.replace(OURS)
            place.clock.advance(seconds=1)
            assert await greeted(port, place.trusting(OURS)) == "hello"

    run(story())


def test_a_client_is_known_by_the_names_in_its_certificate(place: Place, tmp_path: Path):
    OURS.write(place.clients)
    (tmp_path / "c").mkdir()
    client = OURS.issue(tmp_path / "c", "shop", "shop.example", "10.0.0.1")
    stranger = OTHERS.issue(tmp_path / "c", "stranger")

    async def story() -> None:
        async with served(place, mutual=True) as port:
            assert await greeted(port, place.trusting(OURS, client=client)) == "hello shop,shop.example"
            for context in (place.trusting(OURS), place.trusting(OURS, client=stranger)):
                assert await answer_or_refusal(port, context) == ""

    run(story())


async def answer_or_refusal(port: int, context: ssl.SSLContext) -> str:
    """With TLS 1.3 a client believes to be connected before the server has looked at its certificate."""
    try:
        return await greeted(port, context)
    except (ssl.SSLError, ConnectionError):
        return ""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_issuer_that_is_taken_out_is_trusted_no_more(place: Place, tmp_path: Path, version: ssl.TLSVersion):
    OURS.write(place.clients)
    (tmp_path / "c").mkdir()
    old, new = OURS.issue(tmp_path / "c", "old"), OTHERS.issue(tmp_path / "c", "new")

    async def story() -> None:
        async with served(place, mutual=True) as port:
            contexts = [place.trusting(OURS, client=client) for client in (old, new)]
            for context in contexts:
                context.minimum_version = context.maximum_version = version
            assert [await answer_or_refusal(port, context) for context in contexts] == ["hello old", ""]
            OTHERS.write(place.clients)
            place.clock.advance(seconds=1)
            assert [await answer_or_refusal(port, context) for context in contexts] == ["", "hello new"]

    run(story())


def test_mistakes_in_the_files_are_told(place: Place, tmp_path: Path):
    certificate, key = str(place.certificate), str(place.key)
    folder = tmp_path / "other"
    folder.mkdir()
    other_certificate, other_key = OURS.issue(folder, "other")
    _, locked = OURS.issue(folder, "locked", passphrase=b"secret")
    assert "the key does not match the certificate" in refused(
        place, tls_cert_file=certificate, tls_key_file=str(other_key)
    )
    assert "No such file" in refused(place, tls_cert_file=f"{folder}/none", tls_key_file=key)
    assert "PEM" in refused(place, tls_cert_file=key, tls_key_file=key)
    other_certificate.chmod(0o600)
    assert "PEM" in refused(place, tls_cert_file=certificate, tls_key_file=str(other_certificate))
    assert "the key has a passphrase" in refused(place, tls_cert_file=certificate, tls_key_file=str(locked))
    empty = folder / "empty"
    empty.touch()
    problem = refused(place, tls_cert_file=certificate, tls_key_file=key, tls_client_ca_file=str(empty))
    assert str(empty) in problem


def test_a_key_that_others_may_read_is_refused(place: Place):
    place.key.chmod(0o644)
    problem = refused(place, tls_cert_file=str(place.certificate), tls_key_file=str(place.key))
    assert problem.endswith(f"run chmod 600 {place.key}")


def test_key_and_certificate_may_be_one_file(place: Place):
    both = place.folder / "both.pem"
    both.touch(mode=0o600)
    both.write_bytes(place.certificate.read_bytes() + place.key.read_bytes())
    assert tls_context(ServerSettings(tls_cert_file=str(both)), place.clock) is not None


def test_the_names_of_a_certificate():
    certificate = {
        "subject": ((("countryName", "DE"),), (("commonName", "shop"),)),
        "subjectAltName": (
            ("DNS", "shop.example"),
            ("IP Address", "10.0.0.1"),
            ("URI", "spiffe://x/shop"),
            ("DNS", "shop"),
        ),
    }
    assert names_in(certificate) == ("shop", "shop.example", "spiffe://x/shop")
    assert names_in(None) == names_in({}) == ()
