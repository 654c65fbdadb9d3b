"""Confluent's client library, unchanged, with our registry: its serializers, its errors, its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import message_factory

import holdfast
from holdfast.schemas import Schema as OurSchema
from holdfast.schemas import SchemaDecoder, compile_schema, with_header
from holdfast.schemas.wire import with_indexes
from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Serving, serving

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
WIDER = {**ORDER, "fields": [*ORDER["fields"], {"name": "note", "type": "string", "default": ""}]}
OTHER = {**ORDER, "fields": [{"name": "id", "type": "long"}, {"name": "must", "type": "string"}]}
JSON_ORDER = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {"id": {"type": "integer"}},
    "required": ["id"],
}
PROTO = OurSchema(
    "PROTOBUF",
    """syntax = "proto3";
    package shop;
    message Order {
      int64 id = 1;
      repeated string tags = 2;
      Part part = 3;
      message Part { int32 size = 1; }
    }""",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        yield found


@pytest.fixture
def client(server: Serving) -> Iterator[SchemaRegistryClient]:
    with client_of(server) as found:
        yield found


def client_of(server: Serving, **more: Any) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": f"{server.url}/schema-registry", **more})


def avro(schema: Any, *references: SchemaReference) -> Schema:
    return Schema(json.dumps(schema), "AVRO", list(references))


def values_of(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def test_avro_values_go_through_the_serializers_and_our_decoder(server: Serving, client: SchemaRegistryClient):
    value = AvroSerializer(client, json.dumps(ORDER))({"id": 7}, values_of("orders"))
    assert value[:5] == b"\0\0\0\0\1"
    assert AvroDeserializer(client)(value, values_of("orders")) == {"id": 7}
    with holdfast.connect(server.url) as broker:
        assert SchemaDecoder(broker.schemas.schema).decode(value) == {"id": 7}
        assert broker.schemas.get("orders-value").id == 1


def test_json_values_go_through_the_serializers_and_our_decoder(server: Serving, client: SchemaRegistryClient):
    text = json.dumps(JSON_ORDER)
    value = JSONSerializer(text, client)({"id": 7}, values_of("orders"))
    assert JSONDeserializer(text, schema_registry_client=client)(value, values_of("orders")) == {"id": 7}
    with holdfast.connect(server.url) as broker:
        assert SchemaDecoder(broker.schemas.schema).decode(value) == {"id": 7}


def test_protobuf_messages_go_through_the_serializers_and_our_decoder(server: Serving, client: SchemaRegistryClient):
    kind = message_factory.GetMessageClass(compile_schema(PROTO).pool.FindMessageTypeByName("shop.Order"))
    message = kind(id=7, tags=["new"], part=kind.Part(size=3))
    value = ProtobufSerializer(kind, client, {"use.deprecated.format": False})(message, values_of("orders"))
    read = ProtobufDeserializer(kind, {"use.deprecated.format": False}, client)
    assert read(value, values_of("orders")) == message
    with holdfast.connect(server.url) as broker:
        decoded = SchemaDecoder(broker.schemas.schema).decode(value)
        assert decoded == {"id": 7, "tags": ["new"], "part": {"size": 3}}


def test_a_protobuf_schema_that_was_registered_as_text_can_be_read_by_the_client(
    server: Serving, client: SchemaRegistryClient
):
    kind = message_factory.GetMessageClass(compile_schema(PROTO).pool.FindMessageTypeByName("shop.Order"))
    with holdfast.connect(server.url) as broker:
        registered = broker.schemas.register("orders-value", PROTO.text, kind="PROTOBUF")
    value = with_header(registered.id, with_indexes((0,), kind(id=7).SerializeToString()))
    read = ProtobufDeserializer(kind, {"use.deprecated.format": False}, client)
    assert read(value, values_of("orders")).id == 7


def test_the_client_registers_looks_up_compares_and_deletes(client: SchemaRegistryClient):
    first = client.register_schema("orders-value", avro(ORDER))
    assert client.register_schema("orders-value", avro(ORDER)) == first
    assert client.register_schema("copies-value", avro(ORDER)) == first, "the same schema has the same id"
    second = client.register_schema("orders-value", avro(WIDER))
    assert (first, second) == (1, 2)
    assert client.get_subjects() == ["copies-value", "orders-value"]
    assert client.get_versions("orders-value") == [1, 2]
    assert client.get_latest_version("orders-value").version == 2
    assert client.get_version("orders-value", 1).schema_id == first
    assert json.loads(client.get_schema(first).schema_str) == ORDER
    assert client.lookup_schema("orders-value", avro(WIDER)).version == 2
    assert client.test_compatibility("orders-value", avro(WIDER)) is True
    assert client.test_compatibility("orders-value", avro(OTHER)) is False
    assert client.get_compatibility() == "BACKWARD"
    client.set_compatibility("orders-value", "NONE")
    assert client.get_compatibility("orders-value") == "NONE"
    assert client.register_schema("orders-value", avro(OTHER)) == 3
    assert client.delete_version("orders-value", 3) == 3
    assert client.delete_subject("orders-value") == [1, 2]
    assert client.delete_subject("orders-value", permanent=True) == [1, 2, 3]
    assert client.get_subjects() == ["copies-value"]


def test_a_schema_may_refer_to_others(client: SchemaRegistryClient):
    part = {"type": "record", "name": "Part", "fields": [{"name": "size", "type": "int"}]}
    client.register_schema("part", avro(part))
    whole = {"type": "record", "name": "Whole", "fields": [{"name": "part", "type": "Part"}]}
    reference = SchemaReference("Part", "part", 1)
    schema = avro(whole, reference)
    client.register_schema("wholes-value", schema)
    value = AvroSerializer(client, schema)({"part": {"size": 3}}, values_of("wholes"))
    assert AvroDeserializer(client)(value, values_of("wholes")) == {"part": {"size": 3}}
    with pytest.raises(SchemaRegistryError, match="is used by wholes-value") as caught:
        client.delete_subject("part")
    assert caught.value.error_code == 42206


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        (lambda client: client.get_latest_version("nothing"), 404, 40401),
        (lambda client: client.get_version("orders-value", 9), 404, 40402),
        (lambda client: client.get_schema(99), 404, 40403),
        (lambda client: client.lookup_schema("orders-value", avro(WIDER)), 404, 40403),
        (lambda client: client.delete_subject("orders-value", permanent=True), 404, 40405),
        (lambda client: client.get_compatibility("orders-value"), 404, 40408),
        (lambda client: client.register_schema("orders-value", avro(OTHER)), 409, 409),
        (lambda client: client.register_schema("orders-value", avro({"type": "nothing"})), 422, 42201),
        (lambda client: client.get_version("orders-value", "zero"), 422, 42202),
        (lambda client: client.set_compatibility("orders-value", "SIDEWAYS"), 422, 42203),
    ],
)
def test_errors_have_the_codes_of_confluents_registry(client: SchemaRegistryClient, call: Any, status: int, code: int):
    client.register_schema("orders-value", avro(ORDER))
    with pytest.raises(SchemaRegistryError) as caught:
        call(client)
    assert (caught.value.http_status_code, caught.value.error_code) == (status, code)


def test_a_token_is_given_as_password_or_as_bearer(tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[[tokens]]\nname = "a"\nsha256 = "{digest_of("secret")}"\nrole = "producer"\ntopics = ["orders"]\n', "utf-8"
    )
    tokens.chmod(0o600)
    with (
        serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server,
        client_of(server, **{"basic.auth.user.info": "anybody:secret"}) as client,
        client_of(server, **{"basic.auth.user.info": "anybody:wrong"}) as stranger,
    ):
        assert client.register_schema("orders-value", avro(ORDER)) == 1
        with pytest.raises(SchemaRegistryError, match="does not have the right") as caught:
            client.register_schema("others-value", avro(ORDER))
        assert (caught.value.http_status_code, caught.value.error_code) == (403, 40301)
        with pytest.raises(SchemaRegistryError) as caught:
            stranger.get_subjects()
        assert (caught.value.http_status_code, caught.value.error_code) == (401, 40101)
