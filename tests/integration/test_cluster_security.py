"""Nodes that trust each other by TLS: who calls goes along, and nobody can pass for a node, or for somebody else."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cluster.description import read_cluster
from holdfast.cluster.placement import shard_of_topic
from tests.integration.cluster_gear import NAMES, Node, until
from tests.integration.http_gear import Answer
from tests.integration.process_gear import COMMAND, plain_environment
from tests.integration.store_servers import free_port
from tests.unit.certificates import Issuer

pytestmark = [pytest.mark.slow, pytest.mark.serial]

OURS, OTHERS = Issuer("ours"), Issuer("others")
SHARDS = 6


class SecureNode(Node):
    """A node with a certificate, which asks for those of its callers. `caller` is who this test is."""

    caller: ssl.SSLContext

    def __init__(self, folder: Path, place: str, name: str, port: int, issuer: Issuer, tokens: Path) -> None:
        files = folder / f"tls-{name}"
        files.mkdir()
        authority = issuer.write(files / "ca.pem")
        certificate, key = issuer.issue(files, name, "127.0.0.1")
        environ = {
            "HOLDFAST_TLS_CA": str(authority), "HOLDFAST_TLS_CERT": str(certificate), "HOLDFAST_TLS_KEY": str(key),
        }  # fmt: skip
        super().__init__(
            folder, place, name, port, environ, "--tls-cert", str(certificate), "--tls-key", str(key),
            "--tls-client-ca", str(authority), "--tokens", str(tokens),
        )  # fmt: skip
        self.url = f"https://127.0.0.1:{port}"

    def connection(self, timeout_s: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout_s, context=self.caller)

    def wait_for_start(self) -> None:
        assert self.running.stdout is not None
        assert " at https://" in self.running.stdout.readline(), self.log.read_text()


class Secure:
    """Two nodes, their tokens, and callers with and without certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, f"file://{folder}/store"
        command = [*COMMAND, "cluster", "init", self.place, "--shards", str(SHARDS), "--lease", "2s"]
        subprocess.run(command, check=True, env=plain_environment(), timeout=60, stdout=subprocess.DEVNULL)
        self.secret = read_cluster(self.place).secret
        self.tokens = {name: folder / f"{name}.toml" for name in NAMES[:2]}
        self.nodes = [
            SecureNode(folder, self.place, name, port, OURS, self.tokens[name])
            for name, port in zip(NAMES[:2], free_port(2), strict=True)
        ]
        self.admin = self.allow("admin", "--role", "admin")
        self.app = self.allow("app", "--role", "publish,consume,read", "--topics", "mine*")
        self.allow("shop", "--role", "publish,read", "--topics", "mine*", "--certificate", "shop")
        self.act_as("nobody-special")

    def allow(self, name: str, *words: str) -> str:
        """Admit a caller in both tokens files, with one token."""
        command = [*COMMAND, "token", "new", name, *words, "--file", str(self.tokens[NAMES[0]]), "--json"]
        said = subprocess.run(command, capture_output=True, text=True, env=plain_environment(), timeout=60, check=True)
        self.tokens[NAMES[1]].write_bytes(self.tokens[NAMES[0]].read_bytes())
        self.tokens[NAMES[1]].chmod(0o600)
        return str(json.loads(said.stdout).get("token", ""))

    def act_as(self, name: str, issuer: Issuer | None = OURS) -> None:
        """Call with a certificate from now on, or without one."""
        context = ssl.create_default_context(cafile=str(self.folder / f"tls-{NAMES[0]}" / "ca.pem"))
        if issuer is not None:
            folder = self.folder / "callers"
            folder.mkdir(exist_ok=True)
            context.load_cert_chain(*issuer.issue(folder, name))
        for node in self.nodes:
            node.caller = context

    def start(self) -> None:
        for node in self.nodes:
            node.begin()
        for node in self.nodes:
            node.wait_for_start()
        for node in self.nodes:
            until(node.is_ready, "every shard has an owner")

    def topic_on(self, node: Node, start: str) -> str:
        told = node.get("/v1/cluster", token=self.admin).body["shards"]
        owners = {shard["shard"]: shard["node"] for shard in told}
        return next(
            name for name in (f"{start}-{n}" for n in range(10_000))
            if owners[shard_of_topic(name, SHARDS)] == node.name
        )  # fmt: skip


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Iterator[Secure]:
    made = Secure(tmp_path_factory.mktemp("secure"))
    try:
        made.start()
        first = made.nodes[0]
        for start in ("mine", "yours"):
            for node in made.nodes:
                topic = made.topic_on(node, start)
                assert first.request("PUT", f"/v1/queues/{topic}", {}, token=made.admin).status < 300
        yield made
    finally:
        for node in made.nodes:
            node.end()


@pytest.fixture(autouse=True)
def _nobody_special(secure: Secure) -> None:
    secure.act_as("nobody-special")


def put(node: Node, topic: str, **more: Any) -> Answer:
    return node.post(f"/v1/queues/{topic}/enqueue", {"body": "eA=="}, **more)


def test_a_call_is_passed_on_over_tls_and_its_rights_are_those_of_its_token(secure: Secure):
    first, second = secure.nodes
    mine, yours = secure.topic_on(second, "mine"), secure.topic_on(second, "yours")
    for node in secure.nodes:
        for _ in range(5):  # so often that its head is known
            assert put(node, mine, token=secure.app).status < 300
        assert put(node, yours, token=secure.app).code == "forbidden"
        assert put(node, yours, token=secure.admin).status < 300
        assert put(node, mine).code == "unauthenticated"
        assert put(node, mine, token="hf_guess").code == "unauthenticated"
    assert first.log.read_text().count("Traceback") == second.log.read_text().count("Traceback") == 0


def test_a_caller_without_a_token_is_known_by_its_certificate_at_the_owner_too(secure: Secure):
    second = secure.nodes[1]
    mine, yours = secure.topic_on(second, "mine"), secure.topic_on(second, "yours")
    secure.act_as("shop")
    for node in secure.nodes:
        for _ in range(5):
            assert put(node, mine).status < 300
        assert put(node, yours).code == "forbidden"
    secure.act_as("east")  # the name that a node's certificate has
    for node in secure.nodes:
        assert put(node, mine).code == "unauthenticated"


def test_the_audit_log_names_the_caller_and_not_the_node_that_passed_its_call_on(secure: Secure):
    first, second = secure.nodes
    topic = secure.topic_on(second, "audited")
    assert first.request("PUT", f"/v1/queues/{topic}", {}, token=secure.admin).status < 300
    assert first.request("DELETE", f"/v1/topics/{topic}", token=secure.app).code == "forbidden"
    secure.act_as("shop")
    assert first.request("DELETE", f"/v1/topics/{topic}").code == "forbidden"
    secure.act_as("a-stranger")
    assert first.request("DELETE", f"/v1/topics/{topic}").code == "unauthenticated"
    log = first.get("/v1/admin/audit", token=secure.admin).body
    acts, refused = ([act for act in log[kind] if topic in json.dumps(act)] for kind in ("acts", "refused"))
    assert [act["principal"] for act in acts] == ["admin"]
    assert {act["principal"] for act in refused} >= {"app", "shop"}, refused
    assert len(refused) == 3
    assert {act["peer"] for act in acts + refused} == {"127.0.0.1"}
    assert not {act["principal"] for act in acts + refused} & set(NAMES)


@pytest.mark.parametrize("guess", ["", "0" * 64, "x", "\xff" * 64])
def test_no_header_makes_a_caller_a_node_or_somebody_else(secure: Secure, guess: str):
    second = secure.nodes[1]
    yours = secure.topic_on(second, "yours")
    names = "%5B%22admin%22%5D"
    forged = {"x-holdfast-peer": "local", "x-holdfast-names": names, "x-holdfast-shard": "0"}
    secure.act_as("shop")
    for node in secure.nodes:
        for hop in ({}, {"x-holdfast-hop": "1"}):
            answer = put(node, yours, headers={**forged, **hop})
            assert answer.status in (403, 421), answer
            if answer.status == 421:  # the owner is another node, and it is not asked
                assert node is not second
                assert hop
        answer = put(node, yours, headers={**forged, "x-holdfast-node": guess})
        assert (answer.status, answer.code) == (403, "forbidden")
        for path in ("node", "records", "release", "producers"):
            answer = node.post(f"/v1/cluster/{path}", {}, headers={**forged, "x-holdfast-node": guess})
            assert (answer.status, answer.code) == (403, "forbidden"), path
            assert node.post(f"/v1/cluster/{path}", {}, headers=forged).status in (404, 405), path


def test_between_nodes_nothing_is_reachable_but_what_they_need(secure: Secure):
    node = secure.nodes[0]
    headers = {"x-holdfast-node": secure.secret}
    assert node.get("/v1/cluster/node", headers=headers).status == 200
    for path in ("secret", "stop", "records/1", "", "..%2Fadmin", "node/"):
        answer = node.post(f"/v1/cluster/{path}", {}, headers=headers)
        assert answer.status in (404, 405, 421), (path, answer)
    for path in ("records", "release", "producers"):  # what cannot be read changes nothing
        owned = {**headers, "x-holdfast-shard": str(shard_of_topic(secure.topic_on(node, "yours"), SHARDS))}
        answer = node.request("POST", f"/v1/cluster/{path}", b"\xc1 garbage", headers=owned)
        assert answer.status == 400, (path, answer)
        assert "Traceback" not in node.log.read_text()
    # The secret proves a node, not a caller: rights are still those of a token.
    topic = secure.topic_on(node, "yours")
    shard = {**headers, "x-holdfast-shard": str(shard_of_topic(topic, SHARDS)), "x-holdfast-peer": "127.0.0.1"}
    assert put(node, topic, headers=shard).code == "unauthenticated"
    assert put(node, topic, headers=shard, token=secure.app).code == "forbidden"
    for number in ("-1", "99", "x", "1e3", ""):
        answer = put(node, topic, headers={**shard, "x-holdfast-shard": number}, token=secure.admin)
        assert answer.status in (400, 421), (number, answer)


def test_a_caller_with_a_foreign_certificate_or_none_is_refused_whatever_it_knows(secure: Secure):
    headers = {"x-holdfast-node": secure.secret}
    for issuer in (OTHERS, None):
        secure.act_as("north", issuer)
        for node in secure.nodes:
            with pytest.raises((ssl.SSLError, OSError)):
                node.get("/v1/cluster/node", headers=headers)
            with pytest.raises((ssl.SSLError, OSError)):
                node.get("/v1/topics", token=secure.admin)


def test_a_node_with_a_foreign_certificate_gets_no_shard_and_stops_nobody(secure: Secure):
    """It has the keys of the store, so it is listed; but the others neither call it nor let it in."""
    first, second = secure.nodes
    mine = secure.topic_on(second, "mine")
    third = SecureNode(secure.folder, secure.place, NAMES[2], free_port()[0], OTHERS, secure.tokens[NAMES[0]])
    third.begin()
    try:
        third.wait_for_start()
        told = lambda: first.get("/v1/cluster", token=secure.admin).body  # noqa: E731
        until(lambda: third.name in {node["node"] for node in told()["nodes"]}, "the others have read its record")
        for _ in range(30):
            assert put(first, mine, token=secure.app).status < 300
            assert {shard["node"] for shard in told()["shards"]} <= set(NAMES[:2])
    finally:
        third.end()


def test_a_node_that_the_others_cannot_trust_does_not_start(secure: Secure, tmp_path: Path):
    files = tmp_path / "tls"
    files.mkdir()
    certificate, key = OURS.issue(files, "late", "127.0.0.1")
    port = free_port()[0]
    words = ["--tls-cert", str(certificate), "--tls-key", str(key), "--tokens", str(secure.tokens[NAMES[0]])]
    command = [*COMMAND, "serve", "--cluster", secure.place, "--port", str(port), "--node-id", "late", *words]
    for environ, said in (
        ({}, "certificate verify failed"),
        ({"HOLDFAST_TLS_CA": str(tmp_path / "none")}, "HOLDFAST_TLS_CA"),
        ({"HOLDFAST_TLS_CA": str(OTHERS.write(tmp_path / "others.pem"))}, "certificate verify failed"),
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60,
            env={**plain_environment(), "XDG_CACHE_HOME": str(tmp_path / "cache"), **environ},
        )  # fmt: skip
        assert done.returncode != 0
        assert said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_the_owner_asks_its_own_tokens_and_a_revoked_one_is_refused_everywhere(secure: Secure):
    first, second = secure.nodes
    mine = secure.topic_on(second, "mine")
    token = secure.allow("brief", "--role", "producer", "--topics", "mine*")
    until(lambda: put(first, mine, token=token).status < 300, "both nodes know the token")
    revoke = [*COMMAND, "token", "rm", "brief", "--file", str(secure.tokens[second.name])]
    subprocess.run(revoke, check=True, env=plain_environment(), timeout=60, stdout=subprocess.DEVNULL)
    # The first node still knows it, and passes the call on; the owner refuses it.
    until(lambda: put(first, mine, token=token).status == 401, "the owner refuses it")
    assert put(second, mine, token=token).code == "unauthenticated"
    here = secure.topic_on(first, "mine")
    assert put(first, here, token=token).status < 300
    revoke[-1] = str(secure.tokens[first.name])
    subprocess.run(revoke, check=True, env=plain_environment(), timeout=60, stdout=subprocess.DEVNULL)
    for node in secure.nodes:
        for topic in (here, mine):
            until(lambda node=node, topic=topic: put(node, topic, token=token).status == 401, "it is refused")


def test_our_client_works_over_tls_with_either_node(secure: Secure, tmp_path: Path):
    context = secure.nodes[0].caller
    for node in secure.nodes:
        for other in secure.nodes:
            topic = secure.topic_on(other, "mine")
            with holdfast.connect(node.url, token=secure.app, tls=context) as broker:
                before = len(broker.read(topic, limit=1000))
                broker.publish(topic, b"x" * 2_000_000, durability="fsync")
                assert len(broker.read(topic, limit=1000)) == before + 1
