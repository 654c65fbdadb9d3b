"""The command line at a server that speaks TLS: by its address, by a profile, and as somebody with a certificate."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidRequest
from tests.integration.http_gear import serving
from tests.integration.test_client_tls import OTHERS, OURS, Place
from tests.tidy import markdown
from tests.tidy.repo import ROOT
from tests.unit.commands import Run, runner

SOON_S = 10  # far below the time-out of a call
PATIENCE_S = 60


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    for name in ("SSL_CERT_FILE", "HOLDFAST_TLS_CA", "HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)
    call = runner(capsys, monkeypatch)
    monkeypatch.setenv("HOLDFAST_PROFILES", str(tmp_path / "profiles.toml"))
    return call


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def certificate(place: Place, issuer: Any = OURS) -> tuple[str, str]:
    folder = place.folder / "clients"
    folder.mkdir(exist_ok=True)
    found, key = issuer.issue(folder, "shop")
    return str(found), str(key)


def test_a_profile_says_whom_to_trust(run: Run, place: Place):
    with place.serving() as server:
        assert run("profile", "add", "prod", server.url, "--tls-ca", place.ours).code == 0
        assert run("--profile", "prod", "put", "--topic", "jobs", "hello").out == "jobs-0-0\n"
        assert run("peek", "--profile", "prod", "--json").lines[0]["body"] == "hello"
        run("profile", "use", "prod")
        assert run("stats", "--json").document["ready"] == 1
        (message,) = run("get", "@", "--json").lines
        assert run("ack", "@", message["receipt"]).code == 0
        assert run("status").code == 0


def test_variables_say_whom_to_trust(run: Run, place: Place, monkeypatch: pytest.MonkeyPatch):
    with place.serving() as server:
        monkeypatch.setenv("HOLDFAST_TLS_CA", str(place.ours))
        assert run("put", server.url, "--topic", "jobs", "hello").code == 0
        assert run("--at", server.url, "peek", "--json").lines[0]["body"] == "hello"
        monkeypatch.setenv("HOLDFAST_URL", server.url)
        assert run("stats", "--json").document["ready"] == 1


def test_a_server_that_is_not_trusted_is_told_of_at_once(run: Run, place: Place):
    with place.serving() as server:
        began = time.monotonic()
        done = run("put", server.url, "--topic", "jobs", "x", "--wait", "1m")
        assert time.monotonic() - began < SOON_S
        assert done.code == 2
        assert "has not proved its identity" in done.err
        assert "--tls-ca FILE" in done.err
        assert "HOLDFAST_TLS_CA" in done.err
    place.replace(OURS, "queue.example.org")
    with place.serving() as server:
        run("profile", "add", "prod", server.url, "--tls-ca", place.ours)
        assert "a name that is in its certificate" in run("--profile", "prod", "topic", "ls").err


def test_the_wrong_scheme_is_told_of_at_once(run: Run, place: Place):
    began = time.monotonic()
    with place.serving() as server:
        done = run("topic", "ls", server.url.replace("https:", "http:"))
        assert (done.code, "https://" in done.err) == (2, True)
    with serving(place.folder / "plain") as server:
        done = run("topic", "ls", server.url.replace("http:", "https:"))
        assert (done.code, "http://" in done.err) == (2, True)
    assert time.monotonic() - began < SOON_S


def test_a_profile_has_a_certificate_of_its_own(run: Run, place: Place):
    shop, key = certificate(place)
    with place.serving(mutual=True) as server:
        files = ["--tls-ca", place.ours, "--tls-cert", shop, "--tls-key", key]
        made = run("profile", "add", "prod", server.url, *files, "--json").document
        assert (made["tls_ca"], made["tls_cert"], made["tls_key"]) == (str(place.ours), shop, key)
        assert run("--profile", "prod", "put", "--topic", "jobs", "hello").code == 0
        assert run("--profile", "prod", "peek", "--json").lines[0]["body"] == "hello"
        both = place.folder / "both.pem"
        both.write_text(Path(shop).read_text() + Path(key).read_text())
        run("profile", "add", "prod", server.url, "--tls-ca", place.ours, "--tls-cert", both)
        assert run("--profile", "prod", "stats", "--json").document["ready"] == 1


def test_a_certificate_that_is_missing_or_not_trusted_is_told_of_soon(run: Run, place: Place):
    shop, key = certificate(place, OTHERS)
    with place.serving(mutual=True) as server:
        run("profile", "add", "none", server.url, "--tls-ca", place.ours)
        run("profile", "add", "wrong", server.url, "--tls-ca", place.ours, "--tls-cert", shop, "--tls-key", key)
        for name in ("none", "wrong"):
            began = time.monotonic()
            done = run("--profile", name, "topic", "ls", "--json")
            assert time.monotonic() - began < SOON_S
            assert done.error["code"] == "unavailable"
            assert "client certificate" in done.error["message"]
            assert "--tls-cert" in done.error["message"]


def test_variables_hold_for_programs_too(run: Run, place: Place, monkeypatch: pytest.MonkeyPatch):
    shop, key = certificate(place)
    monkeypatch.setenv("HOLDFAST_TLS_CERT", shop)
    monkeypatch.setenv("HOLDFAST_TLS_KEY", key)
    with place.serving(mutual=True) as server:
        with holdfast.connect(server.url, tls=place.ours) as broker:
            assert broker.topics() == []
        monkeypatch.setenv("HOLDFAST_TLS_CA", str(place.ours))
        with holdfast.open(f"{server.url}/jobs") as queue:
            queue.put(b"x")
        with holdfast.connect(server.url, tls=place.context(OURS)) as broker:
            assert broker.topics() == ["jobs"]


def test_files_that_are_no_certificates_are_refused_by_name(run: Run, place: Place, monkeypatch: pytest.MonkeyPatch):
    shop, _ = certificate(place)
    monkeypatch.setenv("HOLDFAST_TLS_CERT", str(place.ours))
    with pytest.raises(InvalidRequest, match=r"HOLDFAST_TLS_CERT=.*ours\.pem"):
        holdfast.connect("https://localhost", tls=place.ours)
    monkeypatch.setenv("HOLDFAST_TLS_CERT", shop)
    monkeypatch.setenv("HOLDFAST_TLS_KEY", str(place.folder / "missing.key"))
    with pytest.raises(InvalidRequest, match=r"missing\.key"):
        holdfast.connect("https://localhost", tls=place.ours)
    secret, secret_key = OURS.issue(place.folder, "secret", passphrase=b"open")
    monkeypatch.setenv("HOLDFAST_TLS_CERT", str(secret))
    monkeypatch.setenv("HOLDFAST_TLS_KEY", str(secret_key))
    with pytest.raises(InvalidRequest, match="passphrase"):
        holdfast.connect("https://localhost", tls=place.ours)


def test_a_profile_for_tls_needs_a_secure_address(run: Run, place: Place):
    shop, key = certificate(place)
    for options in (["--tls-ca", place.ours], ["--tls-cert", shop, "--tls-key", key]):
        done = run("profile", "add", "prod", "http://localhost:7700", *options)
        assert (done.code, "https://" in done.err) == (2, True)
    done = run("profile", "add", "prod", "https://localhost:7700", "--tls-key", key)
    assert (done.code, "--tls-cert" in done.err) == (2, True)


@pytest.mark.slow
def test_a_worker_goes_by_the_profile_and_leaves_the_trust_of_its_handlers_alone(run: Run, place: Place):
    shop, key = certificate(place)
    (place.folder / "handlers_of_tls.py").write_text(
        "import os, signal\n\n\ndef handle(message):\n"
        "    open('seen', 'w').write(os.environ.get('SSL_CERT_FILE', 'none'))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    with place.serving(mutual=True) as server:
        files = ["--tls-ca", place.ours, "--tls-cert", shop, "--tls-key", key]
        run("profile", "add", "prod", f"{server.url}/jobs", *files, "--use")
        assert run("put", "@", "hello").code == 0
        done = subprocess.run(
            [sys.executable, "-c", "from holdfast.cli.main import main; main()", "worker", "handlers_of_tls:handle"],
            cwd=place.folder,
            env={name: value for name, value in os.environ.items() if name != "HOLDFAST_URL"},
            timeout=PATIENCE_S,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert (place.folder / "seen").read_text() == "none"


def test_the_certificates_of_the_guide_pass_strict_checks(place: Place):
    page = ROOT / "docs/how-to/secure-the-server.md"
    (commands,) = [block.code for block in markdown.blocks(page.read_text("utf-8")) if "openssl req" in block.code]
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", commands], cwd=place.folder, check=True, capture_output=True)
    place.ours = place.folder / "ca.pem"
    shop = place.context()
    shop.load_cert_chain(place.folder / "shop.pem", place.folder / "shop.key")
    with place.serving(mutual=True) as server, holdfast.connect(server.url, tls=shop) as broker:
        assert broker.topics() == []
