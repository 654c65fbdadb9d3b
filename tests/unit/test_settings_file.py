"""One settings file and the environment: what they may say, what is made of it, and how mistakes are told."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from holdfast.config import FOREIGN, KNOBS, SECTIONS, Knob, variable
from holdfast.config import settings_file as toml_lines
from holdfast.config.settings_file import Effective, Origin, load_settings, read_settings
from holdfast.env import real_world
from holdfast.env.process import environment
from holdfast.errors import BadSettings
from holdfast.settings import (
    BrokerSettings,
    ConsumerSettings,
    ProducerSettings,
    ServerSettings,
    StoreSettings,
    TopicSettings,
)

DAY_MS = 24 * 3600 * 1000

# Everything that GoQueue's reference has, but what needs a cluster.
GOQUEUE = """
[broker]
id = "broker-1"
host = "0.0.0.0"
port = 8080
data_dir = "./data"

[storage]
segment_size_bytes = 67108864
index_interval_bytes = 4096
fsync_interval_ms = 2000
retention_hours = 168
retention_bytes = -1

[producer]
batch_size = 100
linger_ms = 5
batch_bytes = 65536
ack_mode = "leader"
retries = 3
retry_backoff_ms = 100

[consumer]
session_timeout_ms = 30000
heartbeat_interval_ms = 3000
max_poll_records = 500
auto_commit = true
auto_commit_interval_ms = 5000
visibility_timeout_ms = 40000
max_retries = 3
backoff_multiplier = 2

[dlq]
enabled = true
suffix = ".dlq"
retention_hours = 336
"""


def load(text: str = "", path: str = "holdfast.toml", **environ: str) -> Effective:
    return load_settings(text, environ, path=path)


def problems(text: str | None = "", **environ: str) -> list[str]:
    """Every mistake, as it is told."""
    with pytest.raises(BadSettings) as refused:
        load_settings(text, environ, path="holdfast.toml")
    lines = str(refused.value).split("\n- ")
    return lines if len(lines) == 1 else lines[1:]


def value_of(effective: Effective, path: str) -> Any:
    return next(setting.value for setting in effective.settings() if setting.name == path)


def another(knob: Knob) -> Any:
    """A value that is not the default, and fits all the defaults."""
    kind = inspect.type_info(knob.kind)
    if isinstance(kind, inspect.UnionType):
        kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    match kind:
        case inspect.BoolType():
            return not knob.default
        case inspect.LiteralType():
            return next(value for value in kind.values if value != knob.default)
        case inspect.VarTupleType():
            return list(reversed(knob.default)) or ["queue.example", "10.0.0.5"]
        case inspect.FloatType():
            return 1.0 if knob.default != 1.0 else 0.5
        case inspect.StrType():
            return "https://x" if knob.name.endswith("_endpoint") else "x"
        case _:
            at_most = getattr(kind, "le", None)
            if knob.default is None:
                return 3
            return knob.default - 1 if knob.default == at_most else knob.default + 1


def toml(value: Any) -> str:
    return json.dumps(value)  # the same for all that settings take


def test_nothing_said_is_the_defaults():
    for effective in (load_settings(None, {}), load("")):
        assert effective.broker == BrokerSettings()
        assert effective.server == ServerSettings()
        assert effective.data_dir is None
        assert set(effective.origins.values()) == {Origin("default")}
        assert effective.topic("orders") == TopicSettings()
    assert load_settings(None, {}).path is None
    assert load("").path == "holdfast.toml"


def test_every_field_of_the_settings_has_one_place_in_the_file():
    fields = [(knob.part, knob.field) for knob in KNOBS.values()]
    assert len(set(fields)) == len(fields)
    wanted = {("place", "data_dir")}
    wanted |= {("topic", field) for field in TopicSettings.__struct_fields__}
    wanted |= {("producer", field) for field in ProducerSettings.__struct_fields__}
    wanted |= {("consumer", field) for field in ConsumerSettings.__struct_fields__}
    wanted |= {("server", field) for field in ServerSettings.__struct_fields__}
    wanted |= {("store", field) for field in StoreSettings.__struct_fields__}
    nested = {"producer", "consumer", "topic", "topics"}
    wanted |= {("broker", field) for field in BrokerSettings.__struct_fields__ if field not in nested}
    assert set(fields) == wanted


# Keys are hidden, or count only with others: tests/integration/test_store_keys.py has them.
KEYS = {path for path, knob in KNOBS.items() if knob.is_secret or re.match(r"s3_(access|secret|session)", knob.name)}


@pytest.mark.parametrize("path", sorted(KNOBS.keys() - KEYS))
def test_what_a_file_or_a_variable_sets_is_in_force(path: str):
    knob = KNOBS[path]
    wanted = another(knob)
    in_file = load(f"[{knob.section}]\n{knob.name} = {toml(wanted)}\n")
    text = ",".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
    in_environment = load_settings(None, {variable(knob): text})
    expected = tuple(wanted) if isinstance(wanted, list) else wanted
    for effective in (in_file, in_environment):
        found = value_of(effective, path)
        assert (found, type(found)) == (expected, type(expected))
        others = {setting.name for setting in effective.settings() if setting.origin.kind != "default"}
        assert others == {path}
    assert in_file.origins[path] == Origin("file", "holdfast.toml", 2)
    assert in_environment.origins[path] == Origin("environment", variable(knob))


def test_the_sections_become_the_settings_of_a_broker():
    effective = load(
        """
        [broker]
        id = "b1"
        [storage]
        retention = "3d"
        [producer]
        linger_ms = 20
        [consumer]
        start = "latest"
        [dead_letters]
        enabled = false
        [traces]
        sample = 0.5
        retention = "1d"
        """
    )
    broker = effective.broker
    assert (broker.id, broker.producer.linger_ms, broker.consumer.start) == ("b1", 20, "latest")
    assert (broker.topic.retention_ms, broker.topic.dead_letters, broker.topic.trace_sample) == (3 * DAY_MS, False, 0.5)
    assert broker.trace_retention_ms == DAY_MS


def test_the_environment_goes_before_the_file():
    text = "[queue]\nlease_ms = 10_000\nmax_attempts = 7\n"
    effective = load(text, HOLDFAST_QUEUE_LEASE_MS="20000")
    assert (effective.broker.topic.lease_ms, effective.broker.topic.max_attempts) == (20_000, 7)
    assert effective.origins["queue.lease_ms"] == Origin("environment", "HOLDFAST_QUEUE_LEASE_MS")
    assert str(effective.origins["queue.max_attempts"]) == "holdfast.toml, line 3"


def test_what_is_said_of_a_topic_goes_before_what_its_folder_keeps_and_that_before_the_general():
    text = "[queue]\nlease = '10s'\nmax_attempts = 7\n[topics.orders]\nlease = '1m'\npartitions = 3\n"
    effective = load(text, HOLDFAST_QUEUE_BACKOFF="2s")
    orders = effective.topic("orders", {"lease_ms": 5, "max_attempts": 9})
    assert (orders.lease_ms, orders.max_attempts, orders.backoff_ms, orders.partitions) == (60_000, 9, 2_000, 3)
    other = effective.topic("other")
    assert (other.lease_ms, other.max_attempts, other.partitions) == (10_000, 7, 1)
    problem = {
        each.name: (each.value, str(each.origin)) for each in effective.topic_settings("orders", {"ttl_ms": 9}, "x")
    }
    assert problem == {
        "lease_ms": (60_000, "holdfast.toml, line 5"),
        "partitions": (3, "holdfast.toml, line 6"),
        "ttl_ms": (9, "x"),
    }


def test_the_broker_can_be_asked_for_a_topic_without_the_file():
    broker = load("[topics.orders]\npriority_weights = [1, 1, 1, 1, 1, 1, 1, 1, 1, 2]\n").broker
    assert broker.topics == {"orders": {"priority_weights": (1, 1, 1, 1, 1, 1, 1, 1, 1, 2)}}
    assert broker.of_topic("orders") == TopicSettings(priority_weights=(1, 1, 1, 1, 1, 1, 1, 1, 1, 2))


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("queue.lease", "30s", 30_000),
        ("queue.lease", "1h30m", 5_400_000),
        ("queue.lease", "0.5s", 500),
        ("queue.lease", "0.0001s", 1),
        ("queue.lease_ms", "30s", 30_000),
        ("storage.retention_hours", 1, 3_600_000),
        ("storage.retention_hours", 0.5, 1_800_000),
        ("storage.retention", "2w", 14 * DAY_MS),
        ("dead_letters.retention_hours", 336, 14 * DAY_MS),
        ("consumer.session_timeout", "40s", 40_000),
        ("consumer.rebalance_ms", "40s", 40_000),
    ],
)
def test_times_may_be_written_with_their_unit(name: str, given: Any, wanted: int):
    section, _, key = name.partition(".")
    effective = load(f"[{section}]\n{key} = {toml(given)}")
    assert [setting.value for setting in effective.settings() if setting.origin.kind == "file"] == [wanted]
    text = {f"HOLDFAST_{section}_{key}".upper(): str(given)}
    assert load_settings(None, text).broker == effective.broker


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("64MiB", 64 * 1024**2),
        ("1GiB", 1024**3),
        ("100kB", 100_000),
        ("100KB", 100_000),
        ("100 kb", 100_000),
        ("1.5MB", 1_500_000),
        ("65536B", 65536),
        ("512KiB", 512 * 1024),
    ],
)
def test_sizes_may_be_written_with_their_unit(given: str, wanted: int):
    assert load(f"[storage]\nsegment = '{given}'").broker.topic.segment_bytes == wanted
    assert load(f"[storage]\nsegment_bytes = '{given}'").broker.topic.segment_bytes == wanted
    assert load(HOLDFAST_STORAGE_SEGMENT_BYTES=given).broker.topic.segment_bytes == wanted


def test_a_name_without_unit_is_a_time_or_a_size_by_what_it_says():
    topic = load("[storage]\nretention = '7d'\nsegment = '1MiB'").broker.topic
    assert (topic.retention_ms, topic.retention_bytes, topic.segment_ms) == (7 * DAY_MS, None, None)
    topic = load("[storage]\nretention = '7GB'\nsegment = '1h'").broker.topic
    assert (topic.retention_ms, topic.retention_bytes, topic.segment_ms) == (7 * DAY_MS, 7 * 10**9, 3_600_000)


def test_a_full_name_is_never_taken_for_one_without_its_unit():
    consumer = load("[consumer]\nrebalance = 'eager'\nauto_commit = false").broker.consumer
    assert (consumer.rebalance, consumer.auto_commit, consumer.rebalance_ms) == ("eager", False, 60_000)
    assert problems("[consumer]\nauto_commit = '5s'") == [
        "holdfast.toml, line 2: [consumer] auto_commit: '5s' cannot be used: give true or false"
    ]


@pytest.mark.parametrize("given", ["-1", "'none'"])
def test_minus_one_and_none_are_no_limit(given: str):
    text = f"[queue]\nmax_attempts = {given}\n[storage]\nretention_ms = {given}\nretention_bytes = {given}\n"
    broker = load(f"{text}[producer]\nretries = {given}\n[dead_letters]\nretention = {given}\n").broker
    found = (broker.topic.max_attempts, broker.topic.retention_ms, broker.topic.retention_bytes)
    assert (*found, broker.producer.retries, broker.topic.dead_retention_ms) == (None,) * 5
    assert load(HOLDFAST_QUEUE_MAX_ATTEMPTS=given.strip("'")).broker.topic.max_attempts is None


def test_what_a_setting_takes_itself_is_not_taken_for_no_limit():
    topic = load("[storage]\ncodec = 'none'\n[topics.a]\ncodec_level = -1\ncodec = 'zstd'")
    assert topic.broker.topic.codec == "none"
    assert topic.topic("a").codec_level == -1
    separated = load("[queue]\nkey_group_separator = ':'\n[topics.a]\nkey_group_separator = -1\n")
    assert (separated.topic("b").key_group_separator, separated.topic("a").key_group_separator) == (":", None)
    assert load(HOLDFAST_QUEUE_KEY_GROUP_SEPARATOR="").broker.topic.key_group_separator is None


def test_numbers_in_variables_may_be_grouped_and_switches_be_words_or_digits():
    assert load(HOLDFAST_QUEUE_LEASE_MS="30_000").broker.topic.lease_ms == 30_000
    assert load(HOLDFAST_PRODUCER_IDEMPOTENT="0").broker.producer.idempotent is False
    assert load(HOLDFAST_PRODUCER_IDEMPOTENT="False").broker.producer.idempotent is False


def test_a_file_of_goqueue_is_understood():
    effective = load(GOQUEUE)
    broker, topic = effective.broker, effective.broker.topic
    assert (broker.id, effective.data_dir) == ("broker-1", "data")
    assert (effective.server.host, effective.server.port) == ("0.0.0.0", 8080)
    assert (topic.segment_bytes, topic.index_bytes, topic.sync_interval_ms) == (67_108_864, 4096, 2000)
    assert (topic.retention_ms, topic.retention_bytes) == (7 * DAY_MS, None)
    assert broker.producer == ProducerSettings(acks="leader")
    assert broker.consumer == ConsumerSettings()
    assert (topic.lease_ms, topic.max_attempts, topic.backoff_factor) == (40_000, 3, 2.0)
    assert (topic.dead_letters, topic.dead_retention_ms) == (True, 14 * DAY_MS)
    # All of it was taken: nothing that stands there is left at its default.
    said = sum(len(table) for table in tomllib.loads(GOQUEUE).values())
    assert sum(origin.kind == "file" for origin in effective.origins.values()) == said - 1  # the suffix is no setting


@pytest.mark.parametrize(("foreign", "ours"), FOREIGN.items())
def test_every_foreign_name_is_also_a_variable(foreign: tuple[str, str], ours: tuple[str, str]):
    value = another(KNOBS[".".join(ours)])
    effective = load_settings(None, {f"HOLDFAST_{'_'.join(foreign)}".upper(): str(value)})
    assert value_of(effective, ".".join(ours)) == value


def test_what_is_not_there_yet_is_refused_and_says_so():
    text = '[cluster]\nnodes = []\nmin_isr = 2\n[dlq]\nsuffix = ".dead"\n'
    assert problems(text, HOLDFAST_CLUSTER_MIN_ISR="2", HOLDFAST_DLQ_SUFFIX="x") == [
        (
            "holdfast.toml, line 1: [cluster]: there is no cluster yet, one broker has all the partitions; "
            "remove the section"
        ),
        "holdfast.toml, line 5: [dlq] suffix: '.dead' cannot be used: it is .dlq for every topic",
        "HOLDFAST_CLUSTER_MIN_ISR: there is no cluster yet, one broker has all the partitions; remove it",
        "HOLDFAST_DLQ_SUFFIX: 'x' cannot be used: it is .dlq for every topic",
    ]


def test_unknown_names_are_refused_with_the_nearest_one_and_all_at_once():
    text = """
[storage]
segmnt_bytes = 5
lease = "30s"
[queu]
lease_ms = 5
[topic.orders]
[topics.orders]
leese_ms = 5
cleanups = 3
[producer]
wibble = 1
"""
    environ = {
        "HOLDFAST_PRODUCER_LINGR_MS": "3",
        "HOLDFAST_STORGE_SEGMENT_BYTES": "3",
        "HOLDFAST_STORAGE_LEASE_MS": "3",
    }
    assert problems(text, **environ) == [
        "holdfast.toml, line 3: [storage] segmnt_bytes: there is no such setting; did you mean segment_bytes?",
        "holdfast.toml, line 4: [storage] lease: there is no such setting; lease_ms belongs in [queue]",
        "holdfast.toml, line 5: there is no section [queu]; did you mean [queue]?",
        "holdfast.toml, line 7: there is no section [topic]; did you mean [topics]?",
        "holdfast.toml, line 9: [topics.orders] leese_ms: there is no such setting; did you mean lease_ms?",
        "holdfast.toml, line 10: [topics.orders] cleanups: there is no such setting; did you mean cleanup?",
        "holdfast.toml, line 12: [producer] wibble: there is no such setting; [producer] has "
        + ", ".join(ProducerSettings.__struct_fields__),
        "HOLDFAST_PRODUCER_LINGR_MS: there is no such setting; did you mean HOLDFAST_PRODUCER_LINGER_MS?",
        "HOLDFAST_STORAGE_LEASE_MS: there is no such setting; did you mean HOLDFAST_QUEUE_LEASE_MS?",
        "HOLDFAST_STORGE_SEGMENT_BYTES: there is no such setting; did you mean HOLDFAST_STORAGE_SEGMENT_BYTES?",
    ]


def test_variables_that_are_not_settings_are_left_alone():
    others = ("QUEUE", "RECEIPT", "TRACEBACK", "KEY_BASE64", "BODY_FILE", "ID", "CONFIG", "CORRELATION_ID", "MY_OWN")
    environ = {f"HOLDFAST_{name}": "jobs" for name in others} | {"PATH": "/bin", "holdfast_queue_x": "1"}
    assert load_settings(None, environ).broker == BrokerSettings()
    assert problems(None, HOLDFAST_CONFG="x") == [
        "HOLDFAST_CONFG: there is no such setting; did you mean HOLDFAST_CONFIG?"
    ]


@pytest.mark.parametrize(
    ("section", "line", "words"),
    [
        ("queue", "lease_ms = 0", "0 cannot be used: give a whole number from 1 to 2592000000, or a time"),
        ("queue", "lease_ms = true", "True cannot be used"),
        ("queue", "lease_ms = 1.5", "1.5 cannot be used"),
        ("queue", "lease = 30", '30 cannot be used: give a time such as "30s" or "7d"; lease_ms is a whole'),
        ("queue", "lease = '30'", "'30' cannot be used"),
        ("queue", "lease = '64MiB'", "'64MiB' cannot be used"),
        ("queue", "lease = ''", "'' cannot be used"),
        ("queue", f"lease = '{'9' * 400}s'", "cannot be used"),
        ("queue", "lease = 1979-05-27", "cannot be used"),
        ("queue", "lease_ms = { a = 1 }", "cannot be used"),
        ("queue", "backoff_factor = nan", "nan cannot be used: give a number from 1 to 100"),
        ("queue", "backoff_factor = inf", "inf cannot be used"),
        ("queue", "key_group_rate = 0", "above 0 and up to 1e+09, or -1 for none"),
        ("queue", "lease_hours = true", "True cannot be used: give a number of hours"),
        ("queue", "lease_hours = 'x'", "'x' cannot be used: give a number of hours"),
        ("queue", "priority_weights = [1, 'a']", "a list, each of it a whole number from 1 to 1000000"),
        ("queue", "priority_choice = 'random'", "'random' cannot be used: give one of fair, strict"),
        ("queue", "lease_ms = '30000'", "'30000' cannot be used"),
        ("producer", "idempotent = 'true'", "'true' cannot be used: give true or false"),
        ("storage", "segment = '5000iB'", "segment_ms is a whole number"),
        ("storage", "retention = -1", "retention_ms is a whole number"),
        ("storage", f"segment = '{'9' * 400}GiB'", "cannot be used"),
        ("storage", "segment_bytes = '1h'", "cannot be used: give a whole number from 4096 to 2147483648, or a size"),
        ("storage", "min_free_bytes = -1", "-1 cannot be used: give a whole number, 0 or more"),
        ("broker", "id = 5", "5 cannot be used: give a text of at most 100 characters"),
        ("broker", "data_dir = 5", "5 cannot be used: give a text"),
        ("traces", "sample = 2", "2 cannot be used: give a number from 0 to 1"),
        ("producer", "acks = 'one'", "give one of all, leader, none"),
        ("producer", f"retries = 1{'0' * 4000}", None),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_what_can(section: str, line: str, words: str | None):
    if words is None:
        load(f"[{section}]\n{line}")  # as large as you like, where there is no limit
        return
    (problem,) = problems(f"[{section}]\n{line}")
    name = line.partition(" ")[0]
    assert problem.startswith(f"holdfast.toml, line 2: [{section}] {name}: ")
    assert words in problem
    assert len(problem) < 400


def test_settings_that_do_not_fit_each_other_are_refused_with_where_both_come_from():
    text = "[consumer]\nheartbeat = '40s'\n[storage]\ncodec = 'gzip'\n[topics.a]\ncodec_level = 15\n"
    assert problems(text, HOLDFAST_CONSUMER_SESSION_MS="20000", HOLDFAST_STORAGE_CODEC_LEVEL="20") == [
        (
            "holdfast.toml, line 2 and HOLDFAST_CONSUMER_SESSION_MS: heartbeat_ms (40000) must be below session_ms "
            "(20000), or every member would be considered dead; a third of it is usual"
        ),
        "HOLDFAST_STORAGE_CODEC_LEVEL: codec_level=20 is outside 0 to 9, the levels of gzip",
    ]
    (problem,) = problems("[topics.a]\ncodec = 'gzip'\ncodec_level = 15\n[topics.b]\ncodec = 'zstd'\ncodec_level = 15")
    assert problem == "holdfast.toml, line 3: codec_level=15 is outside 0 to 9, the levels of gzip"


def test_a_wrong_value_does_not_make_others_wrong():
    assert len(problems("[consumer]\nsession = 'x'\nheartbeat = '40s'\n")) == 1
    assert len(problems("[topics.a]\ncodec = 'gzip'\ncodec_level = 'x'\n")) == 1


def test_the_same_setting_under_two_names_is_refused():
    text = "[queue]\nlease_ms = 5\n[consumer]\nvisibility_timeout_ms = 5\n"
    assert problems(text) == [
        (
            "holdfast.toml, line 4: [consumer] visibility_timeout_ms: queue.lease_ms is set twice, "
            "also by [queue] lease_ms (holdfast.toml, line 2); remove one"
        )
    ]
    (problem,) = problems("[dlq]\nretention = '1d'\n[dead_letters]\nretention_hours = 24\n")
    assert "dead_letters.retention_ms is set twice" in problem
    (problem,) = problems(None, HOLDFAST_QUEUE_LEASE="5s", HOLDFAST_QUEUE_LEASE_MS="5")
    assert problem.startswith("HOLDFAST_QUEUE_LEASE_MS: queue.lease_ms is set twice, also by HOLDFAST_QUEUE_LEASE; ")


def test_only_topics_that_may_be_made_can_be_named():
    text = """
[topics."a/b"]
[topics."orders.dlq"]
[topics.__traces]
[topics.a.b]
lease = "1s"
[topics.good]
"""
    problem = problems(text)
    assert [line.split(": ")[0] for line in problem] == [f"holdfast.toml, line {number}" for number in (2, 3, 4, 5)]
    assert "are for dead letters" in problem[1]
    assert problem[3].endswith('where its name has a dot, quote it: [topics."a.b"]')
    assert problems("[topics]\norders = 3\n")[0].endswith("a section of their own: [topics.orders]")
    assert problems("topics = 3\n")[0].endswith("a section of their own: [topics.NAME]")
    assert problems(None, HOLDFAST_TOPICS_ORDERS_LEASE="5s") == [
        "HOLDFAST_TOPICS_ORDERS_LEASE: settings of single topics belong in the file, as [topics.NAME]; remove it"
    ]


def test_what_stands_outside_of_the_sections_is_refused():
    problem = problems("lease_ms = 5\nwibble = 1\nqueue = 3\n[[storage]]\n")
    assert problem[0] == "holdfast.toml, line 1: lease_ms is outside of any section; write it below [queue]"
    assert problem[1].startswith("holdfast.toml, line 2: wibble is outside of any section; settings go in")
    assert problem[2] == "holdfast.toml, line 3: queue is a section: write [queue] and its settings below"
    assert problem[3] == "holdfast.toml, line 4: storage is a section: write [storage] and its settings below"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[queue]\nlease_ms 5\n", "line 2, column 10: this is not TOML: Expected '=' after a key in a key/value pair"),
        ("[queue]\nlease_ms =", "line 2, column 11: this is not TOML: Invalid value"),
        ("[queue]\na = '''x\n\n", "line 4, column 1: this is not TOML: Expected"),
        ("[queue]\r\na = 1\r\na = 2\r\n", "line 3, column 6: this is not TOML: Cannot overwrite a value"),
        ("[queue]\na = " + "[" * 100_000, "line 2: this is nested too deeply"),
        ("[queue]\n\na = [\n" + "9" * 5_000 + "\n]\n", "line 3: this is not TOML: Exceeds the limit"),
    ],
)
def test_what_is_no_toml_is_told_with_its_place_beside_the_mistakes_in_variables(text: str, problem: str):
    both = problems(text, HOLDFAST_QUEUE_LEASE_MS="0")
    assert both[0].startswith(f"holdfast.toml, {problem}")
    assert both[1].startswith("HOLDFAST_QUEUE_LEASE_MS: '0' cannot be used")


def test_nothing_in_a_message_acts_on_a_screen():
    nasty = "\x1b[31m\u202e"
    text = f"[queue]\n{json.dumps(nasty)} = 1\nlease = {json.dumps(nasty)}\n[topics.{json.dumps(nasty)}]\n"
    for problem in problems(text.replace("\\u202e", "\u202e"), **{f"HOLDFAST_QUEUE_{nasty}\n": nasty}):
        assert problem.isprintable()
        assert "\u202e" not in problem


def test_the_file_is_told_by_its_path_if_there_is_one():
    for path, problem in (("", "the settings file"), ("etc/é x.toml", "etc/é x.toml"), ("a\nb", "'a\\nb'")):
        with pytest.raises(BadSettings) as refused:
            load("[queue]\nlease = 1", path=path)
        assert str(refused.value).startswith(f"{problem}, line 2: [queue] lease: ")
        assert load("[queue]\nlease_ms = 1", path=path).origins["queue.lease_ms"] == Origin("file", path, 2)


def test_a_line_is_that_of_the_name_whatever_stands_around_it():
    text = '''# settings
[queue]  # of queues
priority_weights = [
    1, 2, 3, 4, 5,  # lease_ms = 1
    6, 7, 8, 9, 10,
]
lease_ms = 5
[storage]

"codec" = """
zstd"""
retention.x = 1

producer = { linger_ms = 1, acks = "x" }
[topics]
orders.lease_ms = 1
[ topics . "a b" ]
'''
    assert toml_lines.parsed(text)[1] == {
        ("queue",): 2,
        ("queue", "priority_weights"): 3,
        ("queue", "lease_ms"): 7,
        ("storage",): 8,
        ("storage", "codec"): 10,
        ("storage", "retention"): 12,
        ("storage", "retention", "x"): 12,
        ("storage", "producer"): 14,
        ("storage", "producer", "linger_ms"): 14,
        ("storage", "producer", "acks"): 14,
        ("topics",): 15,
        ("topics", "orders"): 16,
        ("topics", "orders", "lease_ms"): 16,
        ("topics", "a b"): 17,
    }
    windows = text.replace("\n", "\r\n")
    assert toml_lines.parsed(windows) == toml_lines.parsed(text)


@pytest.mark.parametrize(
    ("file", "given", "wanted"),
    [
        ("holdfast.toml", "data", "data"),
        ("etc/holdfast.toml", "./data", "etc/data"),
        ("/etc/holdfast/holdfast.toml", "../data", "/etc/data"),
        ("etc/holdfast.toml", "/var/data", "/var/data"),
    ],
)
def test_a_data_folder_is_found_from_where_the_file_is(file: str, given: str, wanted: str):
    text = f"[broker]\ndata_dir = '{given}'"
    assert load(text, path=file).data_dir == wanted
    assert load(text, path=file, HOLDFAST_BROKER_DATA_DIR="here").data_dir == "here"
    text = f"[server]\ntokens_file = '{given}'"
    assert load(text, path=file).server.tokens_file == wanted
    assert load(text, path=file, HOLDFAST_SERVER_TOKENS_FILE="here").server.tokens_file == "here"


def test_the_server_has_a_section():
    text = "[server]\nport = 0\nmax_request = '1MB'\nidle_timeout = '1m'\nsafety_poll_ms = 0\nlog_format = 'json'\n"
    server = load(text, HOLDFAST_SERVER_MAX_WAITERS="200", HOLDFAST_SERVER_ALLOW_ANONYMOUS_NETWORK="true").server
    assert (server.port, server.max_request_bytes, server.idle_timeout_ms) == (0, 1_000_000, 60_000)
    assert (server.safety_poll_ms, server.log_format, server.allow_anonymous_network) == (0, "json", True)
    assert server.max_waiters == 200


def test_the_names_of_lockd_are_understood():
    names = {"MAX_CONSUMERS": "auto", "POLL_INTERVAL": "4s", "POLL_JITTER": "0s", "RESILIENT_POLL_INTERVAL": "1m"}
    (problem,) = problems(None, **{f"HOLDFAST_QUEUE_{name}": value for name, value in names.items()})
    assert problem.startswith("HOLDFAST_QUEUE_MAX_CONSUMERS: 'auto' cannot be used")
    names["MAX_CONSUMERS"] = "300"
    server = load(**{f"HOLDFAST_QUEUE_{name}": value for name, value in names.items()}).server
    found = (server.max_waiters, server.poll_interval_ms, server.poll_jitter_ms, server.safety_poll_ms)
    assert found == (300, 4_000, 0, 60_000)


def test_the_file_is_the_one_named_or_that_of_the_variable_or_none(tmp_path: Path):
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text("[broker]\nid = 'one'\n")
    other.write_bytes(b"\xef\xbb\xbf[broker]\nid = 'other'\n")  # as some editors begin a file
    world, environ = real_world(), {"HOLDFAST_CONFIG": str(other)}
    assert read_settings(world, {}).path is None
    assert read_settings(world, {"HOLDFAST_CONFIG": ""}).broker.id == ""
    assert read_settings(world, environ).broker.id == "other"
    assert read_settings(world, environ, str(one)).broker.id == "one"


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path):
    (tmp_path / "latin.toml").write_bytes(b"[broker]\nid = '\xe9'\n")
    for name, words in (
        ("none.toml", "there is no settings file"),
        ("latin.toml", "line 2: this is not UTF-8"),
        ("", "cannot be read: Is a directory"),
        ("a\0b", "there is no settings file|cannot be read"),
    ):
        with pytest.raises(BadSettings, match=words):
            read_settings(real_world(), {}, f"{tmp_path}/{name}")


def test_the_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOLDFAST_QUEUE_LEASE_MS", "5")
    found = environment()
    monkeypatch.setenv("HOLDFAST_QUEUE_LEASE_MS", "6")
    assert load_settings(None, {"HOLDFAST_QUEUE_LEASE_MS": found["HOLDFAST_QUEUE_LEASE_MS"]}).broker.topic.lease_ms == 5


def test_the_reference_names_every_setting_in_its_section_and_every_foreign_name():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "settings-file.md").read_text("utf-8")
    parts = dict(re.findall(r"^### `\[(\w+)\]`\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    assert set(parts) == set(SECTIONS)
    rows = {f"{section}.{name}" for section in parts for name in re.findall(r"^\| `(\w+)` \|", parts[section], re.M)}
    assert rows == set(KNOBS)
    foreign = dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|", page.partition("## From GoQueue")[2], re.M))
    wanted = {".".join(theirs): ".".join(ours) for theirs, ours in FOREIGN.items()}
    assert {name: ours for name, ours in foreign.items() if name in wanted} == wanted


def test_the_defaults_written_as_a_file_change_nothing():
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for knob in KNOBS.values():
            if knob.section == section and knob.path != "broker.data_dir":
                lines.append(f"{knob.name} = {toml(-1 if knob.default is None else msgspec.to_builtins(knob.default))}")
    # A level of -1 is a level; there is no way to say none but not to say it.
    text = "\n".join(line for line in lines if not line.startswith("codec_level"))
    assert load(text).broker == BrokerSettings()
    assert load(text).server == ServerSettings()
