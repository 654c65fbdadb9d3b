"""Protobuf schemas as text (.proto files), parsed into descriptors.

Only what a registry needs is kept: messages, enums, fields, oneofs and maps, and the options `packed`, `default`,
`deprecated`, `allow_alias` and `json_name`. Other options, services and reserved names are passed over. That types
exist and numbers fit is checked by protobuf's descriptor pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2 as pb

from holdfast.errors import InvalidSchema
from holdfast.schemas.source import MOST_DEPTH

_TOKENS: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)
      |(?P<name>\.?[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)
      |(?P<number>[0-9](?:[0-9A-Za-z_.]|(?<=[eE])[+-])*|\.[0-9](?:[0-9A-Za-z_]|(?<=[eE])[+-])*)
      |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      |(?P<sign>[{}()\[\]<>;,=:/+-])""",
    re.VERBOSE,
)
_ESCAPES: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|([0-7]{1,3})|u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_MOST_NUMBER: Final = 536_870_911
_MOST_ENUM: Final = 2_147_483_647

_FIELD: Final = pb.FieldDescriptorProto
SCALARS: Final[dict[str, Any]] = {
    name: getattr(_FIELD, f"TYPE_{name.upper()}")
    for name in (
        "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "bytes", "uint32",
        "sfixed32", "sfixed64", "sint32", "sint64",
    )
}  # fmt: skip
_LABELS: Final[dict[str, Any]] = {
    "optional": _FIELD.LABEL_OPTIONAL,
    "required": _FIELD.LABEL_REQUIRED,
    "repeated": _FIELD.LABEL_REPEATED,
}


class _ProtoToken(NamedTuple):
    kind: str
    text: str
    at: int


def parse_proto(text: str, name: str) -> pb.FileDescriptorProto:
    """Return the file that a text describes. Raises InvalidSchema, with the line."""
    return _ProtoParser(text, name).file()


class _ProtoParser:
    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._tokens = list(self._split(text))
        self._at = 0
        self._level = 0
        self._file = pb.FileDescriptorProto(name=name)
        self._proto3 = False

    def _split(self, text: str) -> Iterator[_ProtoToken]:
        at = 0
        while at < len(text):
            found = _TOKENS.match(text, at)
            if found is None:
                raise self._wrong(f"{text[at]!r} is unexpected", at)
            if found.lastgroup != "space":
                yield _ProtoToken(found.lastgroup or "", found.group(), at)
            at = found.end()
        yield _ProtoToken("end", "", at)

    def _wrong(self, what: str, at: int | None = None) -> InvalidSchema:
        at = self._peek().at if at is None else at
        return InvalidSchema(
            f"the schema is not a Protobuf schema: line {self._text.count(chr(10), 0, at) + 1}: {what}"
        )

    # Tokens

    def _peek(self) -> _ProtoToken:
        return self._tokens[min(self._at, len(self._tokens) - 1)]

    def _next(self) -> _ProtoToken:
        token = self._peek()
        self._at += 1
        return token

    def _is(self, text: str) -> bool:
        """Take the next token if it is this one."""
        if self._peek().text == text and self._peek().kind != "text":
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._is(text):
            raise self._wrong(f"{self._peek().text or 'the end'!r} where {text!r} is needed")

    def _name(self, what: str) -> str:
        token = self._next()
        if token.kind != "name":
            raise self._wrong(f"{token.text or 'the end'!r} is not a name of {what}", token.at)
        return token.text

    def _own_name(self, what: str) -> str:
        """Return a name that is being given, which has no dots."""
        name = self._name(what)
        if "." in name:
            raise self._wrong(f"{name!r} is not a name of {what}", self._tokens[self._at - 1].at)
        return name

    def _integer(self, most: int) -> int:
        sign = -1 if self._is("-") else 1
        token = self._next()
        try:
            number = sign * (int(token.text, 8) if re.fullmatch("0[0-7]+", token.text) else int(token.text, 0))
        except ValueError:
            raise self._wrong(f"{token.text or 'the end'!r} is not a whole number", token.at) from None
        if not -most - 1 <= number <= most:
            raise self._wrong(f"the number {number} is too large", token.at)
        return number

    def _string(self) -> str:
        token = self._next()
        if token.kind != "text":
            raise self._wrong(f"{token.text or 'the end'!r} where a text in quotes is needed", token.at)
        parts = [token.text[1:-1]]
        while self._peek().kind == "text":
            parts.append(self._next().text[1:-1])
        return _ESCAPES.sub(_unescaped, "".join(parts))

    # A file

    def file(self) -> pb.FileDescriptorProto:
        if self._is("syntax"):
            self._expect("=")
            syntax = self._string()
            if syntax not in ("proto2", "proto3"):
                raise self._wrong(f'the syntax {syntax!r} is not known: use "proto3" or "proto2"')
            self._proto3 = syntax == "proto3"
            if self._proto3:
                self._file.syntax = "proto3"
            self._expect(";")
        elif self._peek().text == "edition":
            raise self._wrong('editions are not known yet: use syntax = "proto3" or "proto2"')
        while self._peek().kind != "end":
            self._statement()
        return self._file

    def _statement(self) -> None:
        if self._is(";"):
            return
        word = self._name("a statement")
        if word == "package":
            self._file.package = self._name("a package")
            self._expect(";")
        elif word == "import":
            public = self._is("public")
            if not public:
                self._is("weak")
            self._file.dependency.append(self._string())
            if public:
                self._file.public_dependency.append(len(self._file.dependency) - 1)
            self._expect(";")
        elif word == "message":
            self._message(self._file.message_type.add())
        elif word == "enum":
            self._enum(self._file.enum_type.add())
        elif word == "extend":
            self._extend(self._file.extension)
        elif word == "option":
            self._skip_statement()
        elif word == "service":
            self._name("a service")
            self._skip_block()
        else:
            raise self._wrong(f"{word!r} is not a statement", self._tokens[self._at - 1].at)

    def _deeper(self) -> None:
        self._level += 1
        if self._level > MOST_DEPTH:
            raise self._wrong(f"it is nested deeper than {MOST_DEPTH} levels")

    def _message(self, made: Any) -> None:
        made.name = self._own_name("a message")
        self._body_of(made)

    def _body_of(self, made: Any) -> None:
        self._deeper()
        self._expect("{")
        while not self._is("}"):
            self._member(made)
        _put_synthetic_last(made)
        self._level -= 1

    def _member(self, made: Any) -> None:
        word = self._peek().text
        following = self._tokens[min(self._at + 1, len(self._tokens) - 1)]
        if self._is(";"):
            return
        if word == "message" and following.kind == "name" and self._opens_after(2):
            self._next()
            self._message(made.nested_type.add())
        elif word == "enum" and following.kind == "name" and self._opens_after(2):
            self._next()
            self._enum(made.enum_type.add())
        elif word == "oneof" and self._opens_after(2):
            self._next()
            self._oneof(made)
        elif word == "extend" and self._opens_after(2):
            self._next()
            self._extend(made.extension)
        elif word == "extensions":
            self._next()
            for first, last in self._ranges(_MOST_NUMBER):
                made.extension_range.add(start=first, end=last + 1)
        elif word in ("option", "reserved"):
            self._next()
            self._skip_statement()
        else:
            self._field(made, made.field)

    def _opens_after(self, count: int) -> bool:
        return self._tokens[min(self._at + count, len(self._tokens) - 1)].text == "{"

    def _field(self, owner: Any, fields: Any, oneof: int | None = None) -> None:
        label = self._name("a type")
        given = label if label in _LABELS and oneof is None and self._peek().kind == "name" else ""
        if label == "map" and self._peek().text == "<":
            self._map(owner, fields, oneof)
            return
        kind = self._name("a type") if given else label
        if kind == "group":
            raise self._wrong("groups are not known: use a message")
        if not given and not self._proto3 and oneof is None:
            raise self._wrong("a field of proto2 begins with optional, required or repeated")
        field = fields.add(label=_LABELS[given or "optional"])
        self._give_type(field, kind)
        self._finish(field)
        if oneof is not None:
            field.oneof_index = oneof
        elif given == "optional" and self._proto3:
            field.proto3_optional = True

    def _give_type(self, field: Any, kind: str) -> None:
        if kind in SCALARS:
            field.type = SCALARS[kind]
        else:
            field.type_name = kind

    def _finish(self, field: Any) -> None:
        field.name = self._own_name("a field")
        self._expect("=")
        field.number = self._integer(_MOST_NUMBER)
        if self._is("["):
            self._options_of(field)
        self._expect(";")

    def _options_of(self, field: Any) -> None:
        while True:
            self._expect("(") if self._peek().text == "(" else None
            name = self._name("an option")
            own = self._is(")")
            if not own and name == "packed":
                self._expect("=")
                field.options.packed = self._name("a value") == "true"
            elif not own and name == "deprecated":
                self._expect("=")
                field.options.deprecated = self._name("a value") == "true"
            elif not own and name == "default":
                self._expect("=")
                field.default_value = self._constant()
            elif not own and name == "json_name":
                self._expect("=")
                field.json_name = self._string()
            else:
                self._skip_until((",", "]"))
            if self._is("]"):
                return
            self._expect(",")

    def _constant(self) -> str:
        if self._peek().kind == "text":
            return self._string()
        sign = "-" if self._is("-") else ""
        return sign + self._next().text

    def _map(self, owner: Any, fields: Any, oneof: int | None) -> None:
        if owner is None or oneof is not None:
            raise self._wrong("a map can only be a field of a message")
        self._expect("<")
        key = self._name("a type")
        self._expect(",")
        value = self._name("a type")
        self._expect(">")
        field = fields.add(label=_FIELD.LABEL_REPEATED)
        self._finish(field)
        entry = owner.nested_type.add(name=_camel(field.name) + "Entry")
        entry.options.map_entry = True
        for number, (name, kind) in enumerate((("key", key), ("value", value)), start=1):
            self._give_type(entry.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL), kind)
        field.type_name = entry.name

    def _oneof(self, owner: Any) -> None:
        owner.oneof_decl.add(name=self._own_name("a oneof"))
        index = len(owner.oneof_decl) - 1
        self._expect("{")
        while not self._is("}"):
            if self._is(";"):
                continue
            if self._peek().text == "option":
                self._next()
                self._skip_statement()
            else:
                self._field(owner, owner.field, index)

    def _extend(self, fields: Any) -> None:
        extended = self._name("a message")
        self._expect("{")
        while not self._is("}"):
            before = len(fields)
            self._field(None, fields)
            for field in fields[before:]:
                field.extendee = extended

    def _enum(self, made: Any) -> None:
        made.name = self._own_name("an enum")
        self._expect("{")
        while not self._is("}"):
            word = self._peek().text
            following = self._tokens[min(self._at + 1, len(self._tokens) - 1)].text
            if self._is(";"):
                continue
            if word == "option" and following != "=":
                self._next()
                if following == "allow_alias":
                    self._next()
                    self._expect("=")
                    made.options.allow_alias = self._is("true")
                self._skip_statement()
            elif word == "reserved" and following != "=":
                self._skip_statement()
            else:
                value = made.value.add(name=self._own_name("a value"))
                self._expect("=")
                value.number = self._integer(_MOST_ENUM)
                if self._is("["):
                    self._skip_until(("]",))
                    self._expect("]")
                self._expect(";")

    def _ranges(self, most: int) -> list[tuple[int, int]]:
        found = []
        while True:
            first = self._integer(most)
            last = first
            if self._is("to"):
                last = most if self._is("max") else self._integer(most)
            found.append((first, last))
            if not self._is(","):
                break
        self._skip_statement()
        return found

    # What is passed over

    def _skip_statement(self) -> None:
        self._skip_until((";",))
        self._expect(";")

    def _skip_until(self, ends: tuple[str, ...]) -> None:
        """Pass over tokens up to one of these, outside of brackets."""
        level = 0
        while level or self._peek().kind == "text" or self._peek().text not in ends:
            token = self._next()
            if token.kind == "end":
                raise self._wrong("the schema ends too early")
            if token.kind == "sign":
                level += (token.text in "{[(") - (token.text in "}])")
                if level < 0:
                    raise self._wrong(f"{token.text!r} is unexpected", token.at)

    def _skip_block(self) -> None:
        if self._peek().text != "{":
            self._expect("{")
        level = 0
        while True:
            token = self._next()
            if token.kind == "end":
                raise self._wrong("the schema ends too early")
            if token.kind == "sign":
                level += (token.text == "{") - (token.text == "}")
            if not level:
                return


def _put_synthetic_last(made: Any) -> None:
    """Give each optional field of proto3 the oneof that stands for it, after those that were written."""
    for field in made.field:
        if field.proto3_optional:
            made.oneof_decl.add(name=f"_{field.name}")
            field.oneof_index = len(made.oneof_decl) - 1


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _unescaped(found: re.Match[str]) -> str:
    hexadecimal, octal, unicode, other = found.groups()
    if other is not None:
        return _ESCAPED.get(other, other)
    return chr(int(hexadecimal or unicode, 16) if octal is None else int(octal, 8) & 0xFF)
