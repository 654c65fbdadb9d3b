"""The Helm chart: what it makes is what Kubernetes knows, and says what the server needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.config import KNOBS
from holdfast.config.settings_file import load_settings
from tests.tidy.repo import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = ROOT / "packaging" / "helm"
HELM = Path(sys.executable).parent / "helm"
PAGE = (ROOT / "docs" / "how-to" / "run-on-kubernetes.md").read_text("utf-8")
NEEDED = {"cluster": {"url": "s3://bucket/jobs"}, "tokens": {"secret": "holdfast-tokens"}}
EVERYTHING = {
    "cluster": {"url": "s3://bucket/jobs", "shards": 32},
    "replicas": 5,
    "imagePullSecrets": ["registry"],
    "tokens": {"secret": "holdfast-tokens"},
    "store": {
        "settings": {"s3_region": "eu-central-1", "s3_endpoint": "https://s3.example"},
        "secret": "holdfast-store",
        "secretKeys": ["s3_access_key_id", "s3_secret_access_key", "google_credentials"],
        "caSecret": "store-ca",
        "port": 8333,
    },
    "env": [{"name": "TZ", "value": "UTC"}],
    "tls": {
        "enabled": True,
        "certManager": {"enabled": True, "issuer": {"name": "ours", "kind": "ClusterIssuer"}, "names": ["q.example"]},
    },
    "cache": {"persistent": True, "storageClass": "fast", "size": "50Gi"},
    "spread": {"required": True},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"role": "arn"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "shop"}}}],
        "metrics": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "store": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    },
    "monitoring": {
        "serviceMonitor": True, "rules": True, "dashboard": True, "labels": {"release": "prometheus"},
        "tokenSecret": {"name": "metrics"},
    },
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "queue", "operator": "Exists"}],
    "priorityClassName": "high",
    "podAnnotations": {"c": "d"},
}  # fmt: skip
SAMPLES = {"needed": NEEDED, "everything": EVERYTHING}
# What operators bring, which Kubernetes itself does not know.
CUSTOM = {"Certificate", "PrometheusRule", "ServiceMonitor"}


def helm(*arguments: str, values: Any = None) -> subprocess.CompletedProcess[str]:
    assert HELM.exists(), "helm comes with the development dependencies: make setup"
    given = json.dumps(values or {})
    return subprocess.run(
        [HELM, *arguments, "-f", "-"], input=given, capture_output=True, text=True, timeout=120, check=False
    )


@cache
def rendered(sample: str) -> dict[tuple[str, str], Any]:
    done = helm("template", "demo", str(CHART), "--namespace", "queues", values=SAMPLES[sample])
    assert done.returncode == 0, done.stderr
    found = [document for document in yaml.safe_load_all(done.stdout) if document]
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found), "two things of one name"
    return named


def pod(sample: str) -> Any:
    return rendered(sample)["StatefulSet", "demo-holdfast"]["spec"]["template"]["spec"]


def refused(values: Any) -> str:
    done = helm("template", "demo", str(CHART), values=values)
    assert done.returncode != 0, done.stdout
    return done.stderr


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("version", ["1.25", "1.31", "1.34"])
def test_kubernetes_knows_everything_that_it_makes(sample: str, version: str):
    for document in rendered(sample).values():
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


def test_a_mistake_in_a_template_would_be_found():
    document = json.loads(json.dumps(rendered("needed")["StatefulSet", "demo-holdfast"]))
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_helm_finds_nothing_wrong():
    for values in SAMPLES.values():
        done = helm("lint", "--strict", str(CHART), values=values)
        assert done.returncode == 0, done.stdout + done.stderr


def test_everything_has_its_kind():
    few = {kind for kind, _ in rendered("needed")}
    assert few == {
        "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount", "StatefulSet"
    }  # fmt: skip
    assert {kind for kind, _ in rendered("everything")} == few | CUSTOM


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cluster": {"url": ""}}, "set cluster.url"),
        ({"cluster": {"url": "/srv/jobs"}}, "/cluster/url"),
        ({"cluster": {"url": "postgresql://me:hush@host/db/jobs"}}, "/cluster/url"),
        ({"tokens": {"secret": ""}}, "set tokens.secret"),
        ({"tokens": {"secert": "x"}}, "secert"),
        ({"store": {"secretKeys": ["s3_access_key_id"]}}, "needs store.secret"),
        ({"store": {"secret": "keys"}}, "needs store.secretKeys"),
        ({"store": {"settings": {"s3_secret_access_key": "hush"}}}, "s3_secret_access_key"),
        ({"settings": "[store]\ns3_region = 'x'\n"}, "/settings"),
        ({"replicas": 20}, "idle"),
        ({"replicas": 0}, "/replicas"),
        ({"tls": {"enabled": True}}, "tls.secret"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuer"),
        ({"replica": 3}, "replica"),
    ],
)
def test_what_cannot_work_is_refused(changes: Any, why: str):
    said = refused({**NEEDED, **changes})
    assert why in said or why.strip("/").replace("/", ".") in said


def test_every_value_is_in_the_schema_and_on_the_page():
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, value in values.items():
        properties = schema["properties"][name].get("properties")
        if isinstance(value, dict) and properties:
            assert set(value) == set(properties), name
    missing = [name for name in values if f"`{name}" not in PAGE]
    assert missing == []


def test_the_keys_and_settings_of_stores_are_those_of_the_server():
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))["properties"]["store"]["properties"]
    for key in schema["secretKeys"]["items"]["enum"]:
        assert f"store.{key}_file" in KNOBS
    for name in schema["settings"]["properties"]:
        assert not KNOBS[f"store.{name}"].is_secret


def test_the_settings_file_of_the_pods_can_be_used():
    text = rendered("everything")["ConfigMap", "demo-holdfast"]["data"]["holdfast.toml"]
    found = load_settings(text, {each["name"]: each.get("value", "") for each in container("everything")["env"]})
    assert found.server.log_format == "json"
    assert found.store.s3_endpoint == "https://s3.example"
    assert found.store.s3_secret_access_key_file == "/etc/holdfast/store/s3_secret_access_key"
    assert found.store.ca_file == "/etc/holdfast/store-ca/ca.crt"
    assert found.broker.store_cache_dir == "/var/cache/holdfast"


def container(sample: str) -> Any:
    [found] = pod(sample)["containers"]
    return found


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_file_that_is_named_is_mounted_and_every_volume_is_there(sample: str):
    spec = pod(sample)
    claimed = rendered(sample)["StatefulSet", "demo-holdfast"]["spec"].get("volumeClaimTemplates", [])
    volumes = {each["name"] for each in spec["volumes"]} | {each["metadata"]["name"] for each in claimed}
    for each in [*spec["containers"], *spec["initContainers"]]:
        mounts = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
        assert set(mounts.values()) <= volumes
        said = [value.get("value", "") for value in each["env"]] + [
            word.partition("=")[2] for word in each["args"] if word.startswith("--")
        ]
        for path in (text for text in said if text.startswith("/")):
            assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path


def test_the_pod_has_time_to_drain():
    spec = pod("needed")
    drain = next(word.partition("=")[2] for word in container("needed")["args"] if word.startswith("--drain="))
    pause = int(container("needed")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= int(drain.removesuffix("s")) + pause + 30


def test_only_the_port_of_the_server_can_be_reached():
    rules = rendered("everything")["NetworkPolicy", "demo-holdfast"]["spec"]
    [ingress] = rules["ingress"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": 7700}]
    assert len(ingress["from"]) == 3  # each other, clients, and those that scrape
    assert rules["policyTypes"] == ["Ingress", "Egress"]
    among, names, store = rules["egress"]
    assert among["to"] == [ingress["from"][0]]
    assert among["ports"] == [{"protocol": "TCP", "port": 7700}]
    assert {each["port"] for each in names["ports"]} == {53}
    assert store == {"ports": [{"protocol": "TCP", "port": 8333}], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    assert [each["containerPort"] for each in container("everything")["ports"]] == [7700]


def test_a_server_can_call_itself_before_it_is_ready_and_its_certificate_has_its_name():
    made = rendered("everything")
    advertised = next(word for word in container("everything")["args"] if word.startswith("--advertise="))
    assert advertised == "--advertise=https://$(POD_NAME).demo-holdfast-nodes.$(POD_NAMESPACE).svc:7700"
    nodes = made["Service", "demo-holdfast-nodes"]["spec"]
    assert nodes["clusterIP"] == "None"
    assert nodes["publishNotReadyAddresses"] is True
    assert made["StatefulSet", "demo-holdfast"]["spec"]["serviceName"] == "demo-holdfast-nodes"
    certificate = made["Certificate", "demo-holdfast"]["spec"]
    assert "*.demo-holdfast-nodes.queues.svc" in certificate["dnsNames"]
    assert "demo-holdfast.queues.svc" in certificate["dnsNames"]
    [volume] = [each for each in pod("everything")["volumes"] if each["name"] == "tls"]
    assert volume["secret"]["secretName"] == certificate["secretName"]


def test_secrets_are_readable_only_by_the_server():
    modes = {each["name"]: each["secret"]["defaultMode"] for each in pod("everything")["volumes"] if "secret" in each}
    assert modes == dict.fromkeys(["tokens", "store", "store-ca", "tls"], 0o440)
    spec = pod("everything")
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"] == 10001
    assert spec["automountServiceAccountToken"] is False
    for each in [*spec["containers"], *spec["initContainers"]]:
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert "hush" not in json.dumps(each)


def test_prometheus_gets_our_rules_and_grafana_our_dashboard():
    made = rendered("everything")
    watch = ROOT / "docs" / "how-to" / "watch-the-server"
    rules = yaml.safe_load((watch / "alerts.yaml").read_text("utf-8"))
    assert made["PrometheusRule", "demo-holdfast"]["spec"] == rules
    dashboard = made["ConfigMap", "demo-holdfast-dashboard"]["data"]["holdfast.json"]
    assert dashboard == (watch / "dashboard.json").read_text("utf-8")
    monitor = made["ServiceMonitor", "demo-holdfast"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    selected = monitor["spec"]["selector"]["matchLabels"]
    services = [each for (kind, _), each in made.items() if kind == "Service"]
    found = [each for each in services if selected.items() <= each["metadata"]["labels"].items()]
    assert [each["metadata"]["name"] for each in found] == ["demo-holdfast-nodes"]  # each server once
    # The rules ask for up{job="holdfast"}: the job is the value of this label.
    assert found[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "holdfast"
    assert set(re.findall(r'job="(\w+)"', json.dumps(rules).replace('\\"', '"'))) <= {"holdfast"}


@pytest.mark.parametrize("sample", SAMPLES)
def test_what_the_pods_run_are_commands_that_there_are(sample: str):
    spec = pod(sample)
    program = Path(sys.executable).parent / "holdfast"
    for each in [*spec["containers"], *spec["initContainers"]]:
        words = [word for word in each["args"] if not word.startswith("-")]
        command = words[:1] if words[0] == "serve" else words[:2]
        told = subprocess.run([program, *command, "--help"], capture_output=True, text=True, timeout=60, check=True)
        for word in each["args"]:
            if word.startswith("--"):
                assert word.partition("=")[0] in told.stdout


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == holdfast.__version__


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_rules_and_the_dashboard_are_not_copies():
    for name in ("alerts.yaml", "dashboard.json"):
        assert (CHART / "files" / name).is_symlink()
