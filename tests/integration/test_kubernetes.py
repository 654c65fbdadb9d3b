"""What the chart and the compose file begin, as processes on this machine: they form a cluster, drain and survive."""

from __future__ import annotations

import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from tests.integration.cluster_gear import PATIENCE_S, until
from tests.integration.process_gear import COMMAND, plain_environment
from tests.integration.store_servers import free_port, weed_with_keys
from tests.tidy.repo import ROOT
from tests.tidy.test_chart import CHART, helm
from tests.unit.certificates import Issuer

pytest.importorskip("obstore")
pytestmark = [pytest.mark.slow, pytest.mark.serial]

COMPOSE = ROOT / "packaging" / "compose"


class Process:
    """A container's command, as a process."""

    def __init__(self, name: str, arguments: list[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._arguments = arguments
        self._environ = {**plain_environment(), **environ}
        self.url = next(word.partition("=")[2] for word in arguments if word.startswith("--advertise="))

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self._arguments], env=self._environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def probed(self, path: str, trust: ssl.SSLContext | None) -> int:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10, context=trust) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def started(nodes: list[Process], trust: ssl.SSLContext | None = None) -> Iterator[None]:
    """Begin all of them, and wait until they are ready, as Kubernetes would."""
    begun = []
    try:
        for node in nodes:
            node.start()
            begun.append(node)
        for node in nodes:
            until(lambda node=node: node.probed("/healthz", trust) == 200, f"{node.name} is healthy")
        for node in nodes:
            until(lambda node=node: node.probed("/readyz", trust) == 200, f"{node.name} is ready")
        yield
    finally:
        for node in begun:
            node.end()


def run(arguments: list[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments], env={**plain_environment(), **environ}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def weed(tmp_path: Path) -> Iterator[str]:
    with weed_with_keys(tmp_path, {"trial": "only-for-trials"}) as address:
        yield address


def test_the_commands_of_the_chart_form_a_cluster_that_drains(weed: str, tmp_path: Path, monkeypatch):
    etc, issuer = tmp_path / "etc", Issuer()
    for folder in ("settings", "store", "tokens", "tls"):
        (etc / folder).mkdir(parents=True)
    (etc / "store" / "s3_access_key_id").write_text("trial")
    (etc / "store" / "s3_secret_access_key").write_text("only-for-trials\n")
    certificate, key = issuer.issue(etc / "tls", "server", "127.0.0.1")
    shutil.move(certificate, etc / "tls" / "tls.crt")
    shutil.move(key, etc / "tls" / "tls.key")
    issuer.write(etc / "tls" / "ca.crt")
    token = run(["token", "new", "ops", "--role", "admin", "--file", str(etc / "tokens" / "tokens.toml")], {}).strip()
    reader = run(
        ["token", "new", "prometheus", "--role", "reader", "--file", str(etc / "tokens" / "tokens.toml")], {}
    ).strip()
    made = chart(
        {
            "cluster": {"url": "s3://holdfast/jobs", "shards": 6, "lease": "2s"},
            "store": {
                "settings": {"s3_endpoint": weed, "s3_region": "us-east-1"},
                "secret": "store", "secretKeys": ["s3_access_key_id", "s3_secret_access_key"],
            },
            "tokens": {"secret": "tokens"},
            "tls": {"enabled": True, "secret": "tls"},
        }
    )  # fmt: skip
    (etc / "settings" / "holdfast.toml").write_text(made["ConfigMap"]["data"]["holdfast.toml"])
    spec = made["StatefulSet"]["spec"]["template"]["spec"]
    nodes = []
    for number, port in enumerate(free_port(made["StatefulSet"]["spec"]["replicas"])):
        place = Place(etc, tmp_path / f"cache-{number}", f"demo-holdfast-{number}", port)
        [create] = spec["initContainers"]
        said = run(place.arguments(create), place.environ(create))
        assert ("created a cluster" if number == 0 else "there is a cluster") in said
        [server] = spec["containers"]
        nodes.append(Process(place.pod, place.arguments(server), place.environ(server), tmp_path / f"{place.pod}.log"))
    trust = ssl.create_default_context(cafile=str(etc / "tls" / "ca.crt"))
    monkeypatch.setenv("HOLDFAST_TLS_CA", str(etc / "tls" / "ca.crt"))
    monkeypatch.setenv("HOLDFAST_TOKEN", token)
    with started(nodes, trust), holdfast.connect([node.url for node in nodes]) as broker:
        topics = [f"topic-{number}" for number in range(8)]
        for topic in topics:
            broker.create_topic(topic)
            broker.publish(topic, b"one", durability="fsync")
        asked = urllib.request.Request(f"{nodes[1].url}/metrics", headers={"Authorization": f"Bearer {reader}"})
        with urllib.request.urlopen(asked, timeout=30, context=trust) as answer:
            assert b"holdfast_cluster_shards 6" in answer.read()
        nodes[0].process.send_signal(signal.SIGTERM)
        until(lambda: nodes[0].process.poll() is not None, "the server has drained")
        assert nodes[0].process.returncode == 0, nodes[0].log.read_text()
        for topic in topics:
            broker.publish(topic, b"two", durability="fsync")
            assert sorted(broker.queue(topic).get(timeout=30).body for _ in range(2)) == [b"one", b"two"]
    logs = "".join(node.log.read_text() for node in nodes)
    assert "only-for-trials" not in logs
    assert token not in logs


def chart(values: Any) -> dict[str, Any]:
    done = helm("template", "demo", str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}


class Place:
    """Where on this machine a pod's files, names and port are."""

    def __init__(self, etc: Path, cache: Path, pod: str, port: int) -> None:
        self.pod = pod
        self._port = port
        self._paths = {"/etc/holdfast": str(etc), "/var/cache/holdfast": str(cache)}

    def arguments(self, container: Any) -> list[str]:
        changed = {"--host": "127.0.0.1", "--port": str(self._port), "--advertise": f"https://127.0.0.1:{self._port}"}
        words = []
        for word in container["args"]:
            name, separator, value = str(word).partition("=")
            value = self._here(changed.get(name, value)).replace("$(POD_NAME)", self.pod)
            words.append(f"{name}{separator}{value}")
        return words

    def environ(self, container: Any) -> dict[str, str]:
        return {each["name"]: self._here(each["value"]) for each in container["env"] if "value" in each}

    def _here(self, text: str) -> str:
        for path, here in self._paths.items():
            text = text.replace(path, here)
        return text


def composed() -> Any:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text("utf-8"))


def test_the_compose_file_is_valid():
    compose_spec = pytest.importorskip("compose_spec")
    names = compose_spec.PyCompose.from_json(json.dumps(composed())).service_names()
    assert {"seaweedfs", "create-bucket", "create-cluster", "one", "two", "three"} == set(names)
    wrong = composed()
    wrong["services"]["one"]["stop_grace"] = "60s"
    with pytest.raises(ValueError, match="stop_grace"):
        compose_spec.PyCompose.from_json(json.dumps(wrong))
    services = composed()["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        build = service.get("build")
        if build:
            assert (COMPOSE / build["context"] / build["dockerfile"]).exists()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (COMPOSE / source).exists() if source.startswith(".") else source in composed()["volumes"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")  # nobody is asked for a token


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_docker_takes_the_compose_file():
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose")
    command = ["docker", "compose", "-f", str(COMPOSE / "compose.yaml"), "config", "--quiet"]
    subprocess.run(command, check=True, timeout=60)


def test_the_commands_of_the_compose_file_form_a_cluster_that_survives_a_kill(weed: str, tmp_path: Path):
    services = composed()["services"]
    names = ["one", "two", "three"]
    ports = dict(zip(names, free_port(3), strict=True))

    def environ(name: str) -> dict[str, str]:
        return {
            each: value.replace("http://seaweedfs:8333", weed).replace("/var/lib/holdfast", f"{tmp_path}/{name}")
            for each, value in services[name]["environment"].items()
        }

    def here(name: str) -> list[str]:
        found = [re.sub(r"^--host=.*", "--host=127.0.0.1", word) for word in services[name]["command"]]
        found = [word.replace(f"http://{name}:7700", f"http://127.0.0.1:{ports[name]}") for word in found]
        return [*found, f"--port={ports[name]}"]

    assert "created a cluster of 16 shards" in run(services["create-cluster"]["command"], environ("create-cluster"))
    nodes = [Process(name, here(name), environ(name), tmp_path / f"{name}.log") for name in names]
    with started(nodes), holdfast.connect([node.url for node in nodes]) as broker:
        broker.create_topic("orders")
        broker.publish("orders", b"one", durability="fsync")
        nodes[0].process.kill()
        broker.publish("orders", b"two", durability="fsync")
        queue = broker.queue("orders")
        assert sorted(queue.get(timeout=60).body for _ in range(2)) == [b"one", b"two"]


def test_a_cluster_is_restored_from_backups_of_its_shards(tmp_path: Path):
    """As the page on Kubernetes says: a backup of each shard, into a new cluster with as many."""
    environ = {"HOLDFAST_BROKER_STORE_CACHE_DIR": str(tmp_path / "cache")}
    old, new = f"file://{tmp_path}/old/jobs", f"file://{tmp_path}/new/jobs"
    shards = [f"{number:04}" for number in range(2)]
    run(["cluster", "init", old, "--shards=2", "--lease=2s"], environ)
    [port, other] = free_port(2)
    topics = [f"topic-{number}" for number in range(6)]

    def node(place: str, port: int) -> Process:
        arguments = ["serve", f"--cluster={place}", f"--port={port}", f"--advertise=http://127.0.0.1:{port}"]
        return Process("node", arguments, environ, tmp_path / f"node-{port}.log")

    one = node(old, port)
    with started([one]), holdfast.connect(one.url) as broker:
        for topic in topics:
            broker.create_topic(topic)
            broker.publish(topic, b"kept", durability="fsync")
        for shard in shards:  # while it runs
            run(["backup", f"{old}/shards/{shard}", f"{tmp_path}/backups-{shard}", "--keep=30"], environ)
    shutil.rmtree(tmp_path / "old")
    run(["cluster", "init", new, "--shards=2", "--lease=2s"], environ)
    for shard in shards:
        run(["restore", f"{tmp_path}/backups-{shard}", f"{new}/shards/{shard}"], environ)
    two = node(new, other)
    with started([two]), holdfast.connect(two.url) as broker:
        assert sorted(broker.topics()) == topics
        for topic in topics:
            assert broker.queue(topic).get(timeout=60).body == b"kept"


def test_the_image_has_what_a_cluster_needs():
    hadolint = Path(sys.executable).parent / "hadolint"
    assert hadolint.exists(), "hadolint comes with the development dependencies: make setup"
    command = [str(hadolint), str(ROOT / "packaging" / "Containerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    text = (ROOT / "packaging" / "Containerfile").read_text("utf-8")
    extras = set(re.search(r"/src\[([\w,]+)\]", text)[1].split(","))
    assert extras >= {"server", "stores", "postgres"}
