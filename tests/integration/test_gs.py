"""A queue at gs://: a server that speaks Google's XML interface as it is documented, because there is none to install.

It shows that URLs, settings and conditions arrive as they should, and nothing about Google Cloud Storage itself.
"""

from __future__ import annotations

import email.utils
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

import holdfast
from holdfast.broker.folder.stored import cache_folder
from holdfast.env.chain.engines import StoreRefused, open_store, parse_place, probe
from holdfast.settings import BrokerSettings

pytest.importorskip("obstore")
URL = "gs://bucket/jobs"
TOKEN = "a-token-of-the-test"


class Bucket(ThreadingHTTPServer):
    """Objects by key, and what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.keeps_condition = True
        self.page = 7  # keys in one answer to a list
        self.asked: list[tuple[str, str, str | None, str | None]] = []


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def log_message(self, *_):
        """Say nothing."""

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", email.utils.formatdate(usegmt=True))
        self.send_header("ETag", '"1"')
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(content)

    def _key(self) -> str:
        path = unquote(urlsplit(self.path).path)
        condition = self.headers.get("x-goog-if-generation-match")
        self.server.asked.append((self.command, path, condition, self.headers.get("Authorization")))
        assert path.startswith("/bucket")
        return path.removeprefix("/bucket").removeprefix("/")

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        key = self._key()
        with self.server.lock:
            if self.headers.get("x-goog-if-generation-match") == "0" and self.server.keeps_condition:
                made = self.server.objects.setdefault(key, content) is content
            else:
                self.server.objects[key], made = content, True
        self._answer(200 if made else 412)

    def do_DELETE(self):
        self._answer(204 if self.server.objects.pop(self._key(), None) is not None else 404)

    def do_GET(self):
        key, query = self._key(), parse_qs(urlsplit(self.path).query)
        if key:
            content = self.server.objects.get(key)
            self._answer(404 if content is None else 200, content or b"")
            return
        assert query["list-type"] == ["2"]
        prefix = query.get("prefix", [""])[0]
        after = max(query.get(name, [""])[0] for name in ("start-after", "continuation-token"))
        with self.server.lock:
            found = sorted(key for key in self.server.objects if key.startswith(prefix) and key > after)
        page = found[: self.server.page]
        stamp = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>1</ETag>"
        listed = "".join(f"<Contents><Key>{escape(key)}</Key>{stamp}<Size>1</Size></Contents>" for key in page)
        if len(found) > len(page):
            listed += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        self._answer(200, f"<?xml version='1.0'?><ListBucketResult>{listed}</ListBucketResult>".encode())


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    with Bucket() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
        monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("HOLDFAST_BROKER_STORE_LEASE_MS", "2000")
        yield server
        server.shutdown()


def test_a_queue_moves_to_another_machine(bucket, tmp_path, monkeypatch):
    with holdfast.open(URL) as queue:
        for i in range(30):
            queue.put(b"%d" % i, durability="fsync")
        queue.get().ack(durability="fsync")
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "another"))
    with holdfast.open(URL) as queue:
        assert [message.body for message in queue.get_many(99, timeout=0)] == [b"%d" % i for i in range(1, 30)]
    assert {token for *_, token in bucket.asked} == {f"Bearer {TOKEN}"}
    assert {condition for verb, _, condition, _ in bucket.asked if verb == "PUT"} == {"0"}
    assert all(key.startswith("jobs/") for key in bucket.objects)


def test_it_keeps_its_promise_over_many_pages(bucket):
    store, root = open_store(parse_place(URL))
    probe(store, root, "one")
    names = [f"{root}part/{n:03}" for n in range(3 * bucket.page + 1)]
    assert all(store.create(name, b"x") for name in names)
    assert not store.create(names[0], b"y")
    assert store.read(names[0]) == b"x"
    assert list(store.keys(f"{root}part/")) == names
    assert list(store.keys(f"{root}part/", after=names[4])) == names[5:]
    store.remove(names[0])
    store.remove(names[0])
    assert store.read(names[0]) is None


def test_one_that_ignores_the_condition_is_refused(bucket):
    bucket.keeps_condition = False
    store, root = open_store(parse_place(URL))
    with pytest.raises(StoreRefused, match="ignores the condition"):
        probe(store, root, "one")


def test_the_same_bucket_at_another_address_is_another_copy(bucket, monkeypatch):
    here = cache_folder(parse_place(URL), BrokerSettings())
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:1")
    assert cache_folder(parse_place(URL), BrokerSettings()) != here


def test_an_address_that_is_none_is_named(bucket, monkeypatch):
    monkeypatch.setenv("GOOGLE_BASE_URL", "not an address")
    with pytest.raises(holdfast.InvalidRequest, match="GOOGLE_BASE_URL=not an address is not an address"):
        holdfast.open(URL)
