"""Writes proto/holdfast/v1/holdfast.proto from the routes of the HTTP API, and the Python stubs from that.

`--check` fails if either is stale. A field keeps its number once it has one, whatever becomes of the structs: numbers
are read from the file that is there. A field that is gone is reserved.

What has no route of its own, the two streams, is written by hand below.
"""

from __future__ import annotations

import argparse
import importlib.resources
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect as types

from holdfast.protocol.media import RAW
from holdfast.protocol.schemas import REGISTRY
from holdfast.server.routing import Route
from holdfast.server.server import API

ROOT: Final = Path(__file__).resolve().parent.parent
PROTO: Final = ROOT / "proto"
NAME: Final = "holdfast/v1/holdfast.proto"
STUBS: Final = ROOT / "src" / "holdfast" / "v1"
STUB_NAMES: Final = ("holdfast_pb2.py", "holdfast_pb2.pyi", "holdfast_pb2_grpc.py")

# Every route is a call with this name; a name that ends with a dot is that of a service for those that follow.
CALLS: Final[dict[str, dict[str, str]]] = {
    "QueueService": {
        "POST /v1/queues/{queue}/batch": "Publish",
        "POST /v1/queues/{queue}/dequeue": "Take",
        "POST /v1/queues/{queue}/ack": "Ack",
        "POST /v1/queues/{queue}/nack": "Nack",
        "POST /v1/queues/{queue}/reject": "Reject",
        "POST /v1/queues/{queue}/extend": "Extend",
        "GET /v1/queues/{queue}/state": "GetMessageState",
        "PUT /v1/queues/{queue}/state": "SaveMessageState",
        "GET /v1/queues/{queue}/inHand": "GetInFlight",
        "PUT /v1/queues/{queue}": "CreateQueue",
        "GET /v1/queues/{queue}/stats": "GetStats",
        "GET /v1/queues/{queue}/peek": "Peek",
        "GET /v1/queues/{queue}/messages": "ListMessages",
        "GET /v1/queues/{queue}/messages/{id}": "GetMessage",
        "GET /v1/queues/{queue}/lookup": "LookUpMessage",
        "DELETE /v1/queues/{queue}/messages/{id}": "CancelMessage",
        "POST /v1/queues/{queue}/messages/{id}/takeBack": "TakeBackMessage",
        "POST /v1/queues/{queue}/messages/{id}/runNow": "RunMessageNow",
        "GET /v1/search": "SearchMessages",
        "POST /v1/queues/{queue}/seek": "Seek",
        "POST /v1/queues/{queue}/purge": "Purge",
        "POST /v1/queues/{queue}/compact": "Compact",
        "GET /v1/queues/{queue}/committed": "GetCommitted",
        "POST /v1/queues/{queue}/pause": "Pause",
        "POST /v1/queues/{queue}/resume": "Resume",
        "GET /v1/queues/{queue}/samples": "GetSamples",
        "POST /v1/queues/{queue}/workers": "ReportWorker",
        "GET /v1/queues/{queue}/dead": "ListDeadLetters",
        "GET /v1/queues/{queue}/dead/groups": "GroupDeadLetters",
        "GET /v1/queues/{queue}/dead/{id}": "GetDeadLetter",
        "POST /v1/queues/{queue}/dead/redrive": "RedriveDeadLetters",
        "POST /v1/queues/{queue}/dead/purge": "PurgeDeadLetters",
        "GET /v1/queues/{queue}/payload": "ReadPayloadInFlight",
        "GET /v1/queues/{queue}/messages/{id}/payload": "ReadPayload",
    },
    "TopicService": {
        "GET /v1/topics": "ListTopics",
        "POST /v1/topics": "CreateTopic",
        "GET /v1/topics/{topic}": "GetTopic",
        "PATCH /v1/topics/{topic}": "AlterTopic",
        "DELETE /v1/topics/{topic}": "DeleteTopic",
        "POST /v1/topics/{topic}/partitions": "AddPartitions",
        "POST /v1/topics/{topic}/compact": "CompactTopic",
        "POST /v1/topics/{topic}/apply-retention": "ApplyRetention",
        "PUT /v1/topics/{topic}/groups/{group}": "CreateGroup",
        "POST /v1/topics/{topic}/messages": "PublishToTopic",
        "GET /v1/topics/{topic}/partitions/{partition}/messages": "ReadMessages",
        "GET /v1/topics/{topic}/partitions/{partition}/payload": "ReadPayloadAt",
        "GET /v1/topics/{topic}/delayed": "ListDelayed",
        "DELETE /v1/topics/{topic}/delayed/{id}": "CancelDelayed",
        "GET /v1/topics/{topic}/settings": "GetTopicSettings",
        "PATCH /v1/topics/{topic}/settings": "AlterTopicSettings",
        "GET /v1/standing": "GetStanding",
        "POST /v1/producers": "BeginProducer",
        "POST /v1/topics/{topic}/partitions/{partition}/append": "Append",
        "GET /v1/topics/{topic}/partitions/{partition}/sequence": "GetNextSequence",
    },
    "GroupService": {
        "GET /v1/groups": "ListGroups",
        "GET /v1/groups/{group}": "GetGroup",
        "DELETE /v1/groups/{group}": "DeleteGroup",
        "GET /v1/groups/{group}/offsets": "GetOffsets",
        "POST /v1/groups/{group}/reset": "ResetOffsets",
        "POST /v1/groups/{group}/members": "Join",
        "POST /v1/groups/{group}/members/{member}/heartbeat": "SendHeartbeat",
        "POST /v1/groups/{group}/members/{member}/poll": "Poll",
        "POST /v1/groups/{group}/members/{member}/commit": "Commit",
        "POST /v1/groups/{group}/members/{member}/seek": "MoveMember",
        "DELETE /v1/groups/{group}/members/{member}": "Leave",
    },
    "LockService": {
        "POST /v1/locks/{name}/acquire": "AcquireLock",
        "POST /v1/locks/{name}/keepalive": "KeepLock",
        "POST /v1/locks/{name}/release": "ReleaseLock",
        "DELETE /v1/locks/{name}": "ForceReleaseLock",
        "GET /v1/locks": "ListLocks",
        "GET /v1/locks/{name}": "GetLock",
        "GET /v1/state": "ListDocuments",
        "GET /v1/state/{name}": "GetDocument",
        "PUT /v1/state/{name}": "UpdateDocument",
        "DELETE /v1/state/{name}": "RemoveDocument",
    },
    "ScheduleService": {
        "GET /v1/schedules": "ListSchedules",
        "GET /v1/schedules/{schedule}": "GetSchedule",
        "PUT /v1/schedules/{schedule}": "PutSchedule",
        "DELETE /v1/schedules/{schedule}": "DeleteSchedule",
        "POST /v1/schedules/{schedule}/pause": "PauseSchedule",
        "POST /v1/schedules/{schedule}/resume": "ResumeSchedule",
        "POST /v1/schedules/{schedule}/run": "RunSchedule",
        "GET /v1/schedules/{schedule}/next": "GetNextDues",
    },
    "TransactionService": {
        "POST /v1/transactions": "BeginTransaction",
        "POST /v1/transactions/commit": "CommitTransaction",
        "GET /v1/transactions": "ListTransactions",
        "DELETE /v1/transactions/{transaction}": "AbortTransaction",
    },
    "AdminService": {
        "GET /v1/admin/status": "GetStatus",
        "POST /v1/admin/sync": "Sync",
        "GET /v1/admin/waiters": "ListWaiters",
        "GET /v1/workers": "ListWorkers",
        "POST /v1/workers/{worker}/drain": "DrainWorker",
        "POST /v1/workers/{worker}/resume": "ResumeWorker",
        "POST /v1/workers/{worker}/stop": "StopWorker",
        "GET /v1/settings": "GetSettings",
        "GET /v1/samples": "GetTotalSamples",
        "GET /v1/traces": "SearchTraces",
        "GET /v1/traces/{message_id}": "GetTrace",
        "GET /v1/traces/stats": "GetTraceStats",
    },
}
# Routes without a call, each with the reason.
LEFT_OUT: Final = {
    "POST /v1/queues/{queue}/enqueue": "a batch of one message: Publish",
    "POST /v1/queues/{queue}/dequeueWithState": "Take with state = true",
    "POST /v1/queues/{queue}/subscribe": "Subscribe, written by hand",
    "POST /v1/queues/{queue}/subscribeWithState": "Subscribe with state = true",
    "GET /v1/queues/{queue}/watch": "events for browsers: use Subscribe or ReadMessages",
    "GET /v1/topics/{topic}/partitions/{partition}/frames": "stored frames, for Spark",
    "POST /v1/topics/{topic}/move": "for nodes of clusters, which do not serve gRPC",
    "GET /healthz": "grpc.health.v1.Health",
    "GET /readyz": "grpc.health.v1.Health",
}

HEAD: Final = """// Holdfast over gRPC: the calls of its HTTP API, and two streams. Written by tools/proto.py.
//
// A call is the HTTP request that its option `route` names: variables of the path are fields, and so are the query's
// parameters and the fields of the body. Times are RFC 3339 texts; seconds are numbers. An empty field is one that is
// not given.

syntax = "proto3";

package holdfast.v1;

import "google/protobuf/descriptor.proto";
import "google/protobuf/struct.proto";

option java_multiple_files = true;
option java_package = "dev.holdfast.v1";

// The request of the HTTP API that a call stands for.
message Route {
  string method = 1;
  string path = 2;
}

extend google.protobuf.MethodOptions {
  Route route = 51007;
}
"""
STREAMS: Final = {
    "QueueService": """\
  // Store messages as they come: each request is a batch, answered in order, when it is stored or with its error.
  rpc PublishStream(stream PublishStreamRequest) returns (stream PublishStreamResponse);

  // Deliver messages as they come, at most `prefetch` of them unsettled. The first request is `start`; those after it
  // settle messages, and each is answered by `settled` with its `number`.
  rpc Subscribe(stream SubscribeRequest) returns (stream SubscribeResponse);
""",
}
STREAM_MESSAGES: Final = """
// What went wrong with one request of a stream, which goes on.
message StreamError {
  string code = 1;
  string message = 2;
  bool retryable = 3;
}

// Messages of one queue. Those that are only a body go in `bodies`, which is faster; not both.
message PublishStreamRequest {
  int64 number = 1;
  string queue = 2;
  repeated NewMessage messages = 3;
  repeated bytes bodies = 4;
  optional string durability = 5;
}

// The results for the messages of the request with this number, in the same order; or why none was stored.
message PublishStreamResponse {
  int64 number = 1;
  repeated Stored stored = 2;
  StreamError error = 3;
}

// What to deliver. Seconds without messages after which an empty response tells that the stream is alive: `heartbeat`.
message SubscribeStart {
  string queue = 1;
  optional int64 prefetch = 2;
  optional string group = 3;
  optional string owner = 4;
  optional double lease = 5;
  optional bool state = 6;
  optional double heartbeat = 7;
}

// A request of a subscription. The queue and the group of what it settles are those of `start`.
message SubscribeRequest {
  int64 number = 1;
  oneof kind {
    SubscribeStart start = 2;
    AckRequest ack = 3;
    NackRequest nack = 4;
    RejectRequest reject = 5;
    ExtendRequest extend = 6;
  }
}

// What became of the settling request with this number.
message SubscribeSettled {
  int64 number = 1;
  int64 settled = 2;
  StreamError error = 3;
}

// Messages, or the answer to a settling request, or neither: a heartbeat.
message SubscribeResponse {
  repeated Delivery messages = 1;
  SubscribeSettled settled = 2;
}
"""
CHUNK: Final = """
// A part of the body of a message.
message PayloadChunk {
  bytes data = 1;
}
"""
_SCALARS: Final[dict[type, str]] = {
    types.IntType: "int64",
    types.FloatType: "double",
    types.StrType: "string",
    types.BytesType: "bytes",
    types.BoolType: "bool",
    types.DateTimeType: "string",
    types.LiteralType: "string",
    types.EnumType: "string",
}
_MESSAGE: Final = re.compile(r"^message (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FIELD: Final = re.compile(r"^  (?:(?:optional|repeated) )?[\w.<>, ]+ (\w+) = (\d+);", re.MULTILINE)
_RESERVED: Final = re.compile(r"^  reserved ([\d, ]+);", re.MULTILINE)


class Writer:
    """Writes the messages of the file, with the numbers that their fields have."""

    def __init__(self, before: str) -> None:
        self.texts: dict[str, str] = {}
        self._numbers = {
            name: {field: int(number) for field, number in _FIELD.findall(body)}
            for name, body in _MESSAGE.findall(before)
        }
        self._gone = {
            name: {int(number) for found in _RESERVED.findall(body) for number in found.split(",")}
            for name, body in _MESSAGE.findall(before)
        }

    def message(self, name: str, about: str, fields: dict[str, Any]) -> None:
        """Write a message; fields by name with their type."""
        if name in self.texts:
            return
        self.texts[name] = ""  # before its fields, which may be of its own kind
        known = self._numbers.get(name, {})
        gone = self._gone.get(name, set()) | {number for field, number in known.items() if field not in fields}
        last = max([0, *known.values(), *gone])
        lines = [f"  reserved {', '.join(map(str, sorted(gone)))};\n"] if gone else []
        rows = []
        for field, kind in fields.items():
            number = known.get(field)
            if number is None:
                number = last = last + 1
            rows.append((number, f"  {self._kind(kind)} {field} = {number};\n"))
        lines += [text for _, text in sorted(rows)]
        self.texts[name] = f"\n{_comment(about, '')}message {name} {{\n{''.join(lines)}}}\n"

    def struct(self, found: types.StructType | types.DataclassType, name: str = "") -> str:
        """Write the message for a struct; returns its name."""
        name = name or found.cls.__name__
        about = (found.cls.__doc__ or "").strip()
        self.message(name, about, fields_of(found.cls))
        return name

    def _kind(self, kind: Any) -> str:
        options = [kind]
        optional = False
        if isinstance(kind, types.UnionType):
            options = [each for each in kind.types if not isinstance(each, types.NoneType)]
            optional = len(options) < len(kind.types)
            options = [each for each in options if not isinstance(each, types.DictType)] or options  # list or map
        first = options[0]
        if isinstance(first, types.ListType | types.VarTupleType | types.SetType | types.FrozenSetType):
            return f"repeated {self._one(first.item_type)}"
        if isinstance(first, types.DictType) and not isinstance(first.value_type, types.AnyType):
            return f"map<string, {self._one(first.value_type)}>"
        text = self._one(first)
        is_message = isinstance(first, types.StructType | types.DataclassType) or text.startswith("google")
        return text if is_message or not optional else f"optional {text}"

    def _one(self, kind: Any) -> str:
        if isinstance(kind, types.StructType | types.DataclassType):
            return self.struct(kind)
        if isinstance(kind, types.DictType):
            return "google.protobuf.Struct"
        if isinstance(kind, types.ListType | types.TupleType | types.VarTupleType):
            return "google.protobuf.ListValue"
        return _SCALARS.get(type(kind), "google.protobuf.Value")


def fields_of(kind: type) -> dict[str, Any]:
    """The fields of a struct as they are encoded, with their types. Optional ones may be left out."""
    info = types.type_info(kind)
    found = {}
    for each in info.fields:  # type: ignore[attr-defined]
        options = each.type.types if isinstance(each.type, types.UnionType) else (each.type,)
        plain = tuple(option for option in options if getattr(option, "cls", None) is not msgspec.UnsetType)
        inner = plain[0] if len(plain) == 1 else types.UnionType(plain)
        has_default = each.default not in (msgspec.NODEFAULT, None, "", 0, False, b"") or each.default is msgspec.UNSET
        scalar = type(inner) in _SCALARS
        if scalar and has_default:  # so that leaving it out means the default
            inner = types.UnionType((inner, types.NoneType()))
        found[each.encode_name] = inner
    return found


def request_fields(route: Route) -> dict[str, Any]:
    """The fields of a request: variables of the path, parameters of the query, and fields of the body."""
    found: dict[str, Any] = {}
    for name in re.findall(r"\{(\w+)\}", route.pattern):
        found[name] = types.IntType() if name == "partition" else types.StrType()
    for part in (route.query, route.body or route.content):
        if part is not None:
            for name, kind in fields_of(part).items():
                found.setdefault(name, kind)
    return found


def _comment(text: str, indent: str) -> str:
    return "".join(f"{indent}// {line.strip()}\n" if line.strip() else f"{indent}//\n" for line in text.splitlines())


def written(before: str) -> str:
    """The text of the file."""
    routes = {f"{each.method} {each.pattern}": each for group in API for each in group.all}
    writer = Writer(before)
    services = ""
    for service, calls in CALLS.items():
        services += f"\n// {_ABOUT[service]}\nservice {service} {{\n{STREAMS.get(service, '')}"
        for key, name in calls.items():
            route = routes.pop(key)
            raw = RAW in route.gives and route.answers is None
            writer.message(f"{name}Request", f"The request of {name}.", request_fields(route))
            if raw:
                answer = "stream PayloadChunk"
            else:
                answer = f"{name}Response"
                if route.answers is None:
                    writer.message(answer, f"The answer to {name}.", {})
                else:
                    writer.struct(types.type_info(route.answers), answer)  # type: ignore[arg-type]
            services += "\n" if not services.endswith("{\n") else ""
            services += _comment(route.summary, "  ")
            services += f"  rpc {name}({name}Request) returns ({answer}) {{\n"
            services += f'    option (route) = {{method: "{route.method}", path: "{route.pattern}"}};\n  }}\n'
        services += "}\n"
    for key in LEFT_OUT:
        routes.pop(key)
    for key in [key for key in routes if REGISTRY in key]:  # it speaks as the clients of Confluent's registry do
        routes.pop(key)
    if routes:
        raise SystemExit(
            f"tools/proto.py: give these routes a call in CALLS, or a reason in LEFT_OUT: {', '.join(routes)}"
        )
    return HEAD + services + STREAM_MESSAGES + CHUNK + "".join(writer.texts.values())


_ABOUT: Final = {
    "QueueService": "Messages of queues: publish, take, settle, look; and dead letters.",
    "TopicService": "Topics and their partitions; and producers that number their messages.",
    "GroupService": "Groups that read topics as streams, and their members.",
    "LockService": "Locks with leases and fencing numbers, and state documents.",
    "ScheduleService": "Messages that are published at certain times.",
    "TransactionService": "Changes of several topics, groups and documents, all or none.",
    "AdminService": "The server itself: its status, settings, workers, samples and traces.",
}


def stubs() -> dict[str, str]:
    """What protoc makes of the file."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        included = str(importlib.resources.files("grpc_tools") / "_proto")
        arguments = [f"-I{PROTO}", f"-I{included}", f"--python_out={folder}", f"--pyi_out={folder}"]
        if protoc.main(["protoc", *arguments, f"--grpc_python_out={folder}", str(PROTO / NAME)]):
            raise SystemExit("tools/proto.py: protoc failed, see above")
        return {name: (Path(folder) / "holdfast" / "v1" / name).read_text("utf-8") for name in STUB_NAMES}


def main() -> None:
    """Write the file and the stubs, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a file is stale, and write nothing")
    check = parser.parse_args().check
    target = PROTO / NAME
    before = target.read_text("utf-8") if target.exists() else ""
    stale = []
    text = written(before)
    if text != before:
        stale.append(target)
        if not check:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
    for name, content in stubs().items():
        stub = STUBS / name
        if not stub.exists() or stub.read_text("utf-8") != content:
            stale.append(stub)
            if not check:
                stub.parent.mkdir(parents=True, exist_ok=True)
                stub.write_text(content, "utf-8")
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
