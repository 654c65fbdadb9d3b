"""When a program with one Protobuf schema can read what was written with another: the rules of Confluent's registry.

Fields are compared by their numbers. Types whose bytes mean the same to both are in one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor as Field

# Types that can be read as one another.
_GROUPS: Final[dict[int, str]] = {
    kind: group
    for group, kinds in {
        "int32, int64, uint32, uint64, bool and enums": (
            Field.TYPE_INT32, Field.TYPE_INT64, Field.TYPE_UINT32, Field.TYPE_UINT64, Field.TYPE_BOOL, Field.TYPE_ENUM,
        ),
        "sint32 and sint64": (Field.TYPE_SINT32, Field.TYPE_SINT64),
        "string and bytes": (Field.TYPE_STRING, Field.TYPE_BYTES),
        "fixed32 and sfixed32": (Field.TYPE_FIXED32, Field.TYPE_SFIXED32),
        "fixed64 and sfixed64": (Field.TYPE_FIXED64, Field.TYPE_SFIXED64),
        "float": (Field.TYPE_FLOAT,),
        "double": (Field.TYPE_DOUBLE,),
        "messages": (Field.TYPE_MESSAGE, Field.TYPE_GROUP),
    }.items()
    for kind in kinds
}  # fmt: skip
_WITH_LENGTH: Final = frozenset({Field.TYPE_STRING, Field.TYPE_BYTES, Field.TYPE_MESSAGE})
_NAMES: Final = {getattr(Field, name): name[5:].lower() for name in dir(Field) if name.startswith("TYPE_")}


def problems(new: Any, old: Any) -> list[str]:
    """Return why messages of the old file cannot be read with the new one, each with its place; [] if they can."""
    found: list[str] = []
    if new.package != old.package:
        found.append(f"the package is {new.package or 'none'}, and was {old.package or 'none'}")
    messages = {_within(each, new): each for each in _all(new.message_types_by_name.values())}
    for message in _all(old.message_types_by_name.values()):
        name = _within(message, old)
        if name not in messages:
            found.append(f"message {name} was removed")
        else:
            found += _fields(messages[name], message, name)
    return found


def _all(messages: Any) -> Iterator[Any]:
    for message in messages:
        if not message.GetOptions().map_entry:
            yield message
            yield from _all(message.nested_types)


def _within(message: Any, file: Any) -> str:
    """Return the name of a message in its file."""
    name: str = message.full_name
    return name.removeprefix(f"{file.package}.") if file.package else name


def _fields(new: Any, old: Any, name: str) -> list[str]:
    found: list[str] = []
    for number, field in old.fields_by_number.items():
        now = new.fields_by_number.get(number)
        place = f"field {name}.{field.name} ({number})"
        if now is not None:
            found += _types(now, field, place)
        elif field.is_required:
            found.append(f"{place} was removed, and was required")
        elif _oneof(field) is not None and any(each.name == _oneof(field).name for each in new.oneofs):
            found.append(f"{place} was removed from the oneof {_oneof(field).name}")
    for number, field in new.fields_by_number.items():
        if field.is_required and number not in old.fields_by_number:
            found.append(f"field {name}.{field.name} ({number}) was added as required: make it optional")
    for oneof in new.oneofs:
        found += _moved(oneof, old, name)
    return found


def _moved(oneof: Any, old: Any, name: str) -> list[str]:
    """Fields that could be set together cannot be any more, if more than one went into a oneof."""
    if _is_synthetic(oneof):
        return []
    before = [old.fields_by_number[each.number] for each in oneof.fields if each.number in old.fields_by_number]
    moved = [each for each in before if _oneof(each) is None]
    if not moved:
        return []
    was_there = any(each.name == oneof.name for each in old.oneofs)
    if len(moved) == 1 and not was_there:
        return []
    names = ", ".join(each.name for each in moved)
    return [f"oneof {name}.{oneof.name}: {names} could be set along with its other fields before"]


def _oneof(field: Any) -> Any:
    found = field.containing_oneof
    return None if found is None or _is_synthetic(found) else found


def _is_synthetic(oneof: Any) -> bool:
    """Whether it only stands for an optional field of proto3."""
    return len(oneof.fields) == 1 and oneof.name == f"_{oneof.fields[0].name}"


def _types(new: Any, old: Any, place: str) -> list[str]:
    if _is_map(new) != _is_map(old):
        return [f"{place} {'became' if _is_map(new) else 'is no longer'} a map"]
    if _is_map(new):
        pairs = zip(new.message_type.fields, old.message_type.fields, strict=True)
        return [reason for now, before in pairs for reason in _types(now, before, f"{place}, {before.name}")]
    if _GROUPS[new.type] != _GROUPS[old.type]:
        return [f"{place} is of the type {_NAMES[new.type]}, and was {_NAMES[old.type]}"]
    if new.type == Field.TYPE_MESSAGE and _local(new.message_type) != _local(old.message_type):
        return [f"{place} is a {_local(new.message_type)}, and was a {_local(old.message_type)}"]
    if new.is_required != old.is_required:
        return [f"{place} {'is required now' if new.is_required else 'is no longer required'}"]
    if new.is_repeated != old.is_repeated and old.type not in _WITH_LENGTH:
        return [f"{place} {'became' if new.is_repeated else 'is no longer'} repeated"]
    return []


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _local(message: Any) -> str:
    """Return the name of a message, without the package if it is its file's own."""
    return _within(message, message.file)
