"""What S3 answers when something is wrong, as its documentation has it, and what an owner makes of that."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import holdfast
from holdfast import InvalidRequest
from holdfast.broker.folder.stored import open_store, parse_place
from holdfast.env import SystemClock
from holdfast.env.chain.chain import Chain, ChainTimes, OwnershipLost, Position
from holdfast.env.chain.engines import Store, StoreRefused, StoreUnreachable, probe
from tests.integration.store_servers import KEYS

pytest.importorskip("obstore")


class S3Stub(ThreadingHTTPServer):
    """Keeps objects, and answers calls with the errors that are lined up, before or after they take effect."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), S3Handler)
        self.objects: dict[str, bytes] = {}
        self.errors: list[tuple[str, int, str, bool]] = []  # method, status, code, whether it takes effect
        self.seen: list[str] = []
        self.lock = threading.Lock()


class S3Handler(BaseHTTPRequestHandler):
    server: S3Stub
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            exists = self.path in self.server.objects and self.headers.get("If-None-Match") == "*"
            error = self.next_error("PUT")
            if error is None or error[3]:
                self.server.objects.setdefault(self.path, content)
        if error is not None:
            self.fail(error[1], error[2])
        elif exists:
            self.fail(412, "PreconditionFailed")
        else:
            self.answer(200, ETag='"1"')

    def do_GET(self) -> None:
        error = self.next_error("GET")
        if error is not None:
            self.fail(error[1], error[2])
        elif self.path in self.server.objects:
            found = self.server.objects[self.path]
            self.answer(200, found, ETag='"1"', Last_Modified="Wed, 21 Oct 2015 07:28:00 GMT")
        elif "list-type" in self.path:
            self.answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        else:
            self.fail(404, "NoSuchKey")

    def next_error(self, method: str) -> tuple[str, int, str, bool] | None:
        self.server.seen.append(method)
        errors = self.server.errors
        return errors.pop(0) if errors and errors[0][0] == method else None

    def fail(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>as documented</Message></Error>".encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def s3(monkeypatch) -> Iterator[tuple[S3Stub, Store]]:
    server = S3Stub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():
        monkeypatch.setenv(name, value)
    store, _ = open_store(parse_place("s3://bucket/jobs"))
    yield server, store
    server.shutdown()
    server.server_close()


def test_what_is_there_is_known_by_the_failed_condition(s3):
    _, store = s3
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    assert store.read("a") == b"1"
    assert store.read("b") is None


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, "ConditionalRequestConflict"),
        (409, "OperationAborted"),
        (500, "InternalError"),
        (503, "SlowDown"),
        (503, "ServiceUnavailable"),
        (400, "RequestTimeout"),
    ],
)
def test_an_error_that_says_nothing_about_the_object_leaves_it_unknown_and_is_tried_again_once(
    s3, status, code, takes_effect
):
    """Taken for "exists", a conflict would let a file count as stored that is nowhere."""
    server, store = s3
    server.errors.append(("PUT", status, code, takes_effect))
    with pytest.raises(StoreUnreachable, match="s3://bucket/jobs"):
        store.create("a", b"1")
    assert server.seen == ["PUT"]  # not by the library, which would take its own first attempt for another's
    chain = Chain.take_over(store, "", SystemClock(), at=Position(), writer=bytes(16))
    assert chain is not None
    server.errors.append(("PUT", status, code, takes_effect))
    chain.batch.make("a")
    chain.commit()
    assert chain.failure is None


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (403, "InvalidAccessKeyId"), (404, "NoSuchBucket")]
)
def test_a_refusal_is_final_and_explained(s3, status, code):
    server, store = s3
    chain = Chain.take_over(store, "", SystemClock(), at=Position(), writer=bytes(16))
    assert chain is not None
    server.errors.append(("PUT", status, code, False))
    chain.batch.make("a")
    with pytest.raises(OwnershipLost, match="the store refused an object"):
        chain.commit()
    server.errors.append(("PUT", status, code, False))
    with pytest.raises(StoreRefused, match="s3://bucket/jobs"):
        store.create("b", b"1")


@pytest.mark.parametrize(
    ("status", "code", "known"),
    [
        (401, "Unauthorized", StoreRefused),
        (403, "InvalidAccessKeyId", StoreRefused),
        (404, "NoSuchBucket", StoreRefused),
        (500, "InternalError", StoreUnreachable),
        (503, "SlowDown", StoreUnreachable),
    ],
)
def test_only_a_list_that_was_not_refused_is_worth_another_try(s3, status, code, known):
    """Whoever opens a folder lists first: a wrong key is shown at once."""
    server, store = s3
    server.errors.append(("GET", status, code, False))
    with pytest.raises(known, match=f"was answered with {status} .*, {code}"):
        store.keys("chain/")
    assert list(store.keys("chain/")) == []


def test_a_store_that_only_says_no_ends_the_owner_in_time(s3):
    server, store = s3
    chain = Chain.take_over(store, "", SystemClock(), at=Position(), writer=bytes(16), times=ChainTimes(slowest_s=0.3))
    assert chain is not None
    server.errors += [("PUT", 503, "SlowDown", False)] * 1000
    chain.batch.make("a")
    with pytest.raises(OwnershipLost, match="did not respond"):
        chain.commit()


def test_a_store_that_answers_some_of_those_who_race_with_a_conflict_passes_the_probe(s3):
    server, store = s3
    plain_get, tried = S3Handler.do_GET, Counter[str]()

    def get(self):
        if "list-type" not in self.path:
            return plain_get(self)
        keys = [key.removeprefix("/bucket/") for key in server.objects]
        facts = "<Size>1</Size><LastModified>2015-10-21T07:28:00Z</LastModified>"
        found = "".join(f"<Contents><Key>{key}</Key>{facts}</Contents>" for key in keys)
        return self.answer(
            200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()
        )

    def removed(self):
        keys = re.findall(rb"<Key>.*?</Key>", self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(200, b"<DeleteResult>%s</DeleteResult>" % b"".join(b"<Deleted>%s</Deleted>" % key for key in keys))

    def next_error(self, method):
        tried[self.path] += method == "PUT"
        conflicts = "race-" in self.path and method == "PUT" and tried[self.path] <= 4
        return ("PUT", 409, "ConditionalRequestConflict", False) if conflicts else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Handler, "do_GET", get)
        patch.setattr(S3Handler, "next_error", next_error)
        patch.setattr(S3Handler, "do_POST", removed, raising=False)
        probe(store, "", "one")
    assert sum("race-" in key for key in server.objects) == 20


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:9000", "http://", "http://host:port", "ftp://host", "http://a b", "http://[", "what is this"],
)
def test_an_endpoint_that_is_no_address_is_named(endpoint, monkeypatch):
    """The library panics at most of them."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest, match=re.escape(f"AWS_ENDPOINT_URL={endpoint} is not an address")):
        holdfast.open("s3://bucket/jobs")


@pytest.mark.parametrize(
    ("method", "status", "code"),
    [
        ("GET", "403 Forbidden", "InvalidAccessKeyId"),
        ("GET", "403 Forbidden", "SignatureDoesNotMatch"),
        ("GET", "404 Not Found", "NoSuchBucket"),
        ("PUT", "403 Forbidden", "AccessDenied"),  # of those who may only read
    ],
)
def test_what_s3_says_is_one_sentence(s3, tmp_path, monkeypatch, method, status, code):
    server, _ = s3
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path))
    error = (method, int(status[:3]), code, False)
    monkeypatch.setattr(S3Handler, "next_error", lambda _, called: error if called == method else None)
    with pytest.raises(holdfast.DiskFailed) as caught:
        holdfast.open("s3://bucket/jobs")
    said = rf"{method} http://\S+ was answered with {status}, {code}, as documented\. Check that[^\n]*"
    assert re.fullmatch(f"s3://bucket/jobs cannot be opened: {said}", str(caught.value))
    assert server.objects == {}


def test_a_server_that_is_not_there_is_named(monkeypatch, tmp_path):
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    store, _ = open_store(parse_place("s3://bucket/jobs"))
    with pytest.raises(StoreUnreachable, match=r"PUT http://127.0.0.1:1/bucket/jobs/a failed: no server could be"):
        store.create("a", b"")
