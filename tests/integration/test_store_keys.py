"""Addresses and keys of stores from our own settings: what a store is sent, and that nobody else sees them."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from contextlib import closing

import pytest

import holdfast
from holdfast.config.settings_file import read_settings
from holdfast.env import real_world
from holdfast.env.chain import keys
from holdfast.env.chain.engines import StoreRefused, StoreUnreachable, open_store, parse_place
from holdfast.errors import DiskFailed, InvalidRequest
from holdfast.settings import BrokerSettings
from holdfast.spark.pipelines.stores import store_options
from tests.integration.store_servers import azurite, azurite_program, postgres, postgres_program, weed_with_keys
from tests.integration.test_s3_errors import S3Handler, S3Stub
from tests.unit.certificates import Issuer

pytest.importorskip("obstore")

THEIRS = ("AWS_", "AZURE_", "GOOGLE_", "HOLDFAST_STORE_")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in keys.environment():
        if name.startswith(THEIRS):
            monkeypatch.delenv(name)
    monkeypatch.setattr(keys, "_from_file", ("", {}))


class Recorder(S3Stub):
    """Keeps the Authorization and the session token of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Recording
        self.sent: list[tuple[str, str | None]] = []
        self.said: list[str] = []

    @property
    def last(self) -> tuple[str, str | None]:
        """The key and region by which the last call was signed, and its session token."""
        return self.sent[-1]


class _Recording(S3Handler):
    server: Recorder

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if parsed:
            scope = self.headers.get("Authorization", "").partition("Credential=")[2].partition(",")[0].split("/")
            signed_by = f"{scope[0]} {scope[2]}" if len(scope) > 2 else ""
            self.server.sent.append((signed_by, self.headers.get("x-amz-security-token")))
            self.server.said.append(self.headers.get("Authorization", ""))
        return parsed


@pytest.fixture
def server():
    from threading import Thread

    with Recorder() as recorder:
        thread = Thread(target=recorder.serve_forever, daemon=True)
        thread.start()
        yield recorder
        recorder.shutdown()
        thread.join()


def address(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def ours(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(f"HOLDFAST_STORE_{name.upper()}", str(value))


def opened(url="s3://bucket/jobs"):
    return closing(open_store(parse_place(url))[0])


def test_our_settings_win_over_those_of_the_maker_and_are_not_mixed_with_them(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "elsewhere-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "theirs")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "their-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "their-token")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    ours(
        monkeypatch, s3_endpoint=address(server), s3_region="here-1", s3_access_key_id="us", s3_secret_access_key="hush"
    )
    with opened() as store:
        assert store.create("a", b"1")
    assert server.last == ("us here-1", None)


def test_without_ours_those_of_the_maker_count(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", address(server))
    monkeypatch.setenv("AWS_REGION", "elsewhere-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "theirs")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "their-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "their-token")
    with opened() as store:
        store.create("a", b"1")
    assert server.last == ("theirs elsewhere-1", "their-token")


def test_a_variable_wins_over_the_file_and_the_file_over_the_maker(server, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_REGION", "elsewhere-1")
    (tmp_path / "secret").write_text("hush\n")
    file = tmp_path / "holdfast.toml"
    file.write_text(
        f'[store]\ns3_endpoint = "{address(server)}"\ns3_region = "file-1"\n'
        's3_access_key_id = "file"\ns3_secret_access_key_file = "secret"\n'  # beside the settings file
    )
    read_settings(real_world(), {}, str(file))
    with opened() as store:
        store.create("a", b"1")
    assert server.last == ("file file-1", None)
    ours(monkeypatch, s3_region="variable-1")
    with opened() as store:
        store.create("a", b"1")
    assert server.last == ("file variable-1", None)


def test_the_file_that_the_environment_names_counts_for_whoever_opens_a_store(server, monkeypatch, tmp_path):
    """Backups, clusters and tasks of Spark ask for no other settings."""
    file = tmp_path / "holdfast.toml"
    file.write_text(
        f'[store]\ns3_endpoint = "{address(server)}"\ns3_region = "file-1"\n'
        's3_access_key_id = "file"\ns3_secret_access_key = "hush"\n'
    )
    monkeypatch.setenv("HOLDFAST_CONFIG", str(file))
    with opened() as store:
        store.create("a", b"1")
    assert server.last == ("file file-1", None)
    monkeypatch.setattr(keys, "_from_file", ("", {}))
    file.write_text('[store]\ns3_regoin = "hush"\n')
    with pytest.raises(holdfast.errors.BadSettings, match="s3_region"):
        open_store(parse_place("s3://bucket/jobs"))


def test_a_second_file_that_says_otherwise_is_refused_and_the_same_one_may_change(tmp_path):
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('[store]\ns3_region = "here-1"\n')
    other.write_text('[store]\ns3_region = "there-1"\n')
    holdfast.open_broker(tmp_path / "data", settings_file=one).close()
    with pytest.raises(holdfast.errors.BadSettings, match=r"other\.toml differs from .*one\.toml"):
        holdfast.open_broker(tmp_path / "data", settings_file=other)
    one.write_text('[store]\ns3_region = "there-1"\n')
    holdfast.open_broker(tmp_path / "data", settings_file=one).close()
    holdfast.open_broker(tmp_path / "data", settings_file=other).close()  # says the same now


def test_keys_in_files_are_read_again_when_they_are_replaced(server, monkeypatch, tmp_path):
    for name, value in {"id": "first", "secret": "hush", "token": "t-1"}.items():
        (tmp_path / name).write_text(f"{value}\n")
    ours(
        monkeypatch, s3_endpoint=address(server), s3_region="here-1", s3_access_key_id_file=tmp_path / "id",
        s3_secret_access_key_file=tmp_path / "secret", s3_session_token_file=tmp_path / "token",
    )  # fmt: skip
    with opened() as store:
        store.create("a", b"1")
        assert server.last == ("first here-1", "t-1")
        (tmp_path / "id").write_text("second")
        (tmp_path / "token").write_text("t-2")
        wait_until(lambda: store.create("b", b"1") or server.last == ("second here-1", "t-2"))
        (tmp_path / "id").unlink()  # on its way to be replaced: the last ones go on
        store.create("c", b"1")
        assert server.last == ("second here-1", "t-2")


def wait_until(what):
    import time

    until = time.monotonic() + 30
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read: No such file"), ("", "one line"), ("hush\nhush", "one line"), (b"\xff\xfe", "one line")],
    ids=["missing", "empty", "two lines", "not text"],
)
def test_a_file_without_a_key_is_told_of_without_its_content(monkeypatch, tmp_path, content, why):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    ours(monkeypatch, s3_access_key_id="us", s3_secret_access_key_file=path)
    with pytest.raises(InvalidRequest, match=why) as told:
        open_store(parse_place("s3://bucket/jobs"))
    assert "s3_secret_access_key_file" in str(told.value)
    assert "hush" not in str(told.value)


def test_an_endpoint_that_could_not_win_is_refused(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    ours(monkeypatch, s3_endpoint="http://127.0.0.1:2")
    with pytest.raises(InvalidRequest, match="AWS_ENDPOINT_URL_S3"):
        open_store(parse_place("s3://bucket/jobs"))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("s3_endpoint", "host:9000", "is not an address"),
        ("s3_endpoint", "http://me:hush@host", "user or a password"),
        ("s3_secret_access_key", "hush", "belong together"),
        ("azure_account_key", "hu\nsh", "line breaks"),
        ("s3_secret_acess_key", "hush", "unknown setting"),
        ("postgres_password", "hush" * 5000, "cannot be used"),
    ],
)
def test_a_mistake_in_a_variable_is_told_of_without_a_secret(monkeypatch, name, value, why):
    ours(monkeypatch, **{name: value})
    for call in (lambda: open_store(parse_place("s3://bucket/jobs")), lambda: holdfast.open("memory://mistake")):
        with pytest.raises(holdfast.errors.BadSettings) as told:
            call()
        assert "hush" not in str(told.value)
    assert why in str(told.value) or name == "s3_secret_acess_key"


def test_another_endpoint_is_another_queue_with_a_copy_of_its_own(monkeypatch, tmp_path):
    from holdfast.broker.folder.stored import cache_folder

    settings = BrokerSettings(store_cache_dir=str(tmp_path))
    place = parse_place("s3://bucket/jobs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    by_theirs = cache_folder(place, settings)
    ours(monkeypatch, s3_endpoint="http://127.0.0.1:2")
    assert cache_folder(place, settings) != by_theirs
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:3")
    ours(monkeypatch, s3_endpoint="http://127.0.0.1:1")
    assert cache_folder(place, settings) == by_theirs


def test_tables_in_a_store_are_told_the_same(monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("hush")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "their-token")
    ours(monkeypatch, s3_endpoint="http://127.0.0.1:2", s3_access_key_id="us",
         s3_secret_access_key_file=tmp_path / "secret")  # fmt: skip
    assert store_options("s3://bucket/lake") == {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:2",
        "AWS_ACCESS_KEY_ID": "us",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "allow_http": "true",
    }


def test_azure_and_google_get_what_they_need(server, monkeypatch, tmp_path):
    ours(monkeypatch, azure_endpoint=address(server), azure_account_name="shop", azure_account_key="aHVzaA==")
    with opened("az://container/jobs") as store:
        store.create("a", b"1")
    assert server.said[-1].startswith("SharedKey shop:")
    monkeypatch.delenv("HOLDFAST_STORE_AZURE_ACCOUNT_KEY")
    (tmp_path / "key").write_text("aHVzaA==")
    ours(monkeypatch, azure_account_key_file=tmp_path / "key")
    with opened("az://container/jobs") as store:
        store.create("b", b"1")
    assert server.said[-1].startswith("SharedKey shop:")
    said = repr(keys.store_options("az"))
    assert "account_name" in said
    assert "aHVzaA" not in said
    ours(monkeypatch, google_credentials_file=tmp_path / "missing.json")
    with pytest.raises(InvalidRequest, match=r"missing\.json"):
        open_store(parse_place("gs://bucket/jobs"))


def test_a_server_with_a_certificate_of_ones_own_is_trusted_by_ca_file(server, monkeypatch, tmp_path):
    issuer = Issuer()
    certificate, key = issuer.issue(tmp_path, "server", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    issuer.write(tmp_path / "ca.pem")
    ours(monkeypatch, s3_endpoint=f"https://localhost:{server.server_address[1]}", s3_region="here-1",
         s3_access_key_id="us", s3_secret_access_key="hush")  # fmt: skip
    with opened() as store, pytest.raises(StoreUnreachable):
        store.create("a", b"1")
    ours(monkeypatch, ca_file=tmp_path / "ca.pem")
    with opened() as store:
        assert store.create("a", b"1")
    ours(monkeypatch, ca_file=tmp_path / "server.key")
    (tmp_path / "server.key").write_text("nothing")
    with pytest.raises(InvalidRequest, match="holds no certificates"):
        open_store(parse_place("s3://bucket/jobs"))


def test_no_secret_is_shown_by_config_show_and_by_a_server(monkeypatch, tmp_path):
    ours(monkeypatch, s3_access_key_id="us", s3_secret_access_key="hush-1", postgres_password="hush-2")
    file = tmp_path / "holdfast.toml"
    file.write_text('[store]\nazure_account_key = "hush-3"\n[broker]\ntier = "postgresql://me:hush-4@host/db/q"\n')
    for arguments in (["--json"], []):
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "config", "show", "--config", str(file), *arguments],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "hush" not in done.stdout + done.stderr
        assert "***" in done.stdout
    shown = json.loads(
        subprocess.run(
            [sys.executable, "-m", "holdfast", "config", "show", "--config", str(file), "--json"],
            capture_output=True, text=True, check=True,
        ).stdout
    )["settings"]  # fmt: skip
    assert shown["store.s3_access_key_id"]["value"] == "us"
    assert shown["store.azure_account_key"]["value"] == "***"
    assert shown["store.s3_session_token"]["value"] is None
    assert shown["broker.tier"]["value"] == "postgresql://host/db/q"


@pytest.mark.slow
@pytest.mark.serial
def test_real_signatures_with_seaweedfs_that_knows_two_keys(monkeypatch, tmp_path):
    with weed_with_keys(tmp_path, {"first": "secret-1", "second": "secret-2"}) as endpoint:
        (tmp_path / "id").write_text("first")
        (tmp_path / "secret").write_text("secret-1")
        ours(monkeypatch, s3_endpoint=endpoint, s3_region="us-east-1", s3_access_key_id_file=tmp_path / "id",
             s3_secret_access_key_file=tmp_path / "secret")  # fmt: skip
        monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
        with holdfast.open("s3://holdfast/jobs") as queue:
            queue.put(b"one", durability="fsync")
            (tmp_path / "id").write_text("second")
            (tmp_path / "secret").write_text("secret-2")
            queue.put(b"two", durability="fsync")
            assert [queue.get().body for _ in range(2)] == [b"one", b"two"]
        (tmp_path / "secret").write_text("wrong")
        with pytest.raises((DiskFailed, InvalidRequest), match="403 Forbidden") as told:
            holdfast.open("s3://holdfast/jobs")
        assert "wrong" not in str(told.value)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.skipif(postgres_program("initdb") is None, reason="there is no PostgreSQL here")
def test_postgresql_takes_the_password_and_the_url_wins(monkeypatch, tmp_path):
    with postgres(tmp_path, auth="scram-sha-256", password="open sesame") as (url, _):
        monkeypatch.setenv("PGPASSWORD", "hush-1")
        with pytest.raises(DiskFailed, match="password authentication failed"):
            open_store(parse_place(url))
        (tmp_path / "secret").write_text("open sesame\n")
        ours(monkeypatch, postgres_password_file=tmp_path / "secret")
        with opened(url) as store:
            assert store.create("a", b"1")
        with pytest.raises(DiskFailed, match="password authentication failed") as told:
            open_store(parse_place(url.replace("holdfast@", "holdfast:hush-2@")))
        assert "hush-2" not in str(told.value)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.skipif(azurite_program() is None, reason="there is no Azurite here: npm install -g azurite")
def test_azure_takes_the_account_and_a_key_in_a_file(monkeypatch, tmp_path):
    with azurite(tmp_path) as (url, environ):
        (tmp_path / "key").write_text(environ["AZURE_STORAGE_ACCOUNT_KEY"])
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aHVzaA==")  # it is not used, or nothing would work
        ours(
            monkeypatch, azure_endpoint=environ["AZURE_ENDPOINT"], azure_account_key_file=tmp_path / "key",
            azure_account_name=environ["AZURE_STORAGE_ACCOUNT_NAME"],
        )  # fmt: skip
        with opened(url) as store:
            assert store.create("a", b"1")
            (tmp_path / "key").write_text("aHVzaA==")
            with pytest.raises(StoreRefused, match="403"):
                store.create("b", b"1")
