"""The proto file and its stubs are what the routes and protoc make of each other, and follow the usual style."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.tidy.repo import ROOT

pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed: it has protoc")
pytest.importorskip("grpc_health")

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from holdfast.v1 import holdfast_pb2 as pb
from tests.tidy.grpc_reference import PAGE, with_tables
from tools import proto

SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
CAMEL = re.compile(r"([A-Z][a-z0-9]*)+")


def test_the_proto_file_and_the_stubs_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "proto.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}renew them: python tools/proto.py"


def test_the_reference_shows_every_call_and_every_error():
    page = PAGE.read_text("utf-8")
    assert with_tables(page) == page, "renew it: python -m tests.tidy.grpc_reference --write"


def test_packages_services_calls_messages_and_fields_are_named_as_is_usual():
    """The rules that buf calls its standard category, as far as they apply to a file without enums."""
    file = pb.DESCRIPTOR
    assert re.fullmatch(r"([a-z]+\.)+v[0-9]+", file.package)
    assert file.name == f"{file.package.replace('.', '/')}/holdfast.proto"
    assert not file.enum_types_by_name
    requests: list[str] = []
    for service in file.services_by_name.values():
        assert CAMEL.fullmatch(service.name)
        assert service.name.endswith("Service")
        for method in service.methods:
            assert CAMEL.fullmatch(method.name)
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name in (f"{method.name}Response", "PayloadChunk")
            requests.append(method.input_type.name)
    assert len(set(requests)) == len(requests) > 80
    for message in file.message_types_by_name.values():
        assert CAMEL.fullmatch(message.name)
        for field in message.fields:
            assert SNAKE.fullmatch(field.name), f"{message.name}.{field.name}"


def test_everything_has_a_comment():
    text = (proto.PROTO / proto.NAME).read_text("utf-8")
    bare = re.findall(r"(?<!\n)\n(?!//|  //)[^\n]*\n(?:message|service|  rpc) (\w+)", text)
    assert bare == []


def test_a_field_keeps_its_number_and_that_of_a_field_that_is_gone_is_reserved():
    before = (proto.PROTO / proto.NAME).read_text("utf-8")
    (body,) = (body for name, body in proto._MESSAGE.findall(before) if name == "TakeRequest")
    renumbered = body.replace("queue = 1;", "queue = 90;") + "  string once = 91;\n"
    after = proto.written(before.replace(body, renumbered))
    (again,) = (body for name, body in proto._MESSAGE.findall(after) if name == "TakeRequest")
    assert "queue = 90;" in again
    assert "reserved 91;" in again
    assert proto.written(after) == after


def test_no_field_was_renumbered_by_hand():
    """What clients were built with: fields that are needed to take and settle a message."""
    known = {
        "TakeRequest": {"queue": 1, "count": 2, "wait": 3, "owner": 4, "lease": 5, "group": 6},
        "AckRequest": {"queue": 1, "receipts": 2},
        "PublishStreamRequest": {"number": 1, "queue": 2, "messages": 3, "bodies": 4, "durability": 5},
        "SubscribeRequest": {"number": 1, "start": 2, "ack": 3, "nack": 4, "reject": 5, "extend": 6},
    }
    for name, fields in known.items():
        message: Descriptor = pb.DESCRIPTOR.message_types_by_name[name]
        assert fields.items() <= {field.name: field.number for field in message.fields}.items(), name


def test_whether_a_field_that_has_a_default_was_given_can_be_told():
    take: dict[str, FieldDescriptor] = pb.TakeRequest.DESCRIPTOR.fields_by_name
    assert take["count"].has_presence
    assert not take["queue"].has_presence
