"""`holdfast schema`: schemas of message bodies, and whether a new one is compatible with earlier ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from holdfast.api.schemas import check_level, check_subject
from holdfast.cli import output
from holdfast.cli.opening import WAIT, AsJson, DataFolder, Wait, opened_broker
from holdfast.cli.parsing import Section, argument, option
from holdfast.errors import InvalidRequest, NotFound
from holdfast.schemas.decoding import compile_schema
from holdfast.schemas.registry import Level, SchemaVersion, incompatibilities
from holdfast.schemas.source import CompiledSchema, Kind, Reference, Schema, check_kind

app = Section("Schemas of message bodies: versions, compatibility.")

Subject: TypeAlias = Annotated[str, argument("SUBJECT", "The subject, such as orders-value.")]
SchemaFile: TypeAlias = Annotated[str, argument("FILE", "The file with the schema; `-` reads it from stdin.")]
KindName: TypeAlias = Annotated[
    str | None, option("--type", "avro, json or protobuf; by default as the file's name ends: .avsc, .json or .proto.")
]
References: TypeAlias = Annotated[
    list[str], option("--reference", "A schema that this one uses, as NAME=SUBJECT:VERSION; may be repeated.")
]
_ENDS: Final[dict[str, Kind]] = {".avsc": "AVRO", ".json": "JSON", ".proto": "PROTOBUF"}
_REFERENCE: Final = re.compile(r"(?P<name>[^=]+)=(?P<subject>.+):(?P<version>[0-9]{1,9})")
_INCOMPATIBLE: Final = output.DAMAGED


@app.command("ls")
def ls_command(
    folder: DataFolder,
    deleted: Annotated[bool, option("--deleted", "Also those that were deleted, though not permanently.")] = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """List the subjects: their newest version, its id, and the compatibility level that applies.

    Examples:
        holdfast schema ls ./data
    """
    with opened_broker(folder, wait=wait) as broker:
        schemas = broker.schemas
        found = [
            (schemas.get(subject, deleted=deleted), schemas.versions(subject, deleted=deleted), schemas.level(subject))
            for subject in schemas.subjects(deleted=deleted)
        ]
    if as_json:
        output.print_each(
            {**_document(newest), "versions": numbers, "level": level} for newest, numbers, level in found
        )
    elif not found:
        output.note(f"no schemas in {output.safe(folder)}")
    else:
        shown = output.table("subject", "type", "newest>", "id>", "versions>", "compatibility")
        for newest, numbers, level in found:
            shown.add_row(
                output.safe(newest.subject), newest.kind, str(newest.version), str(newest.id), str(len(numbers)), level
            )
        output.stdout().print(shown)
    return output.OK


@app.command("show")
def show_command(
    folder: DataFolder,
    subject: Subject,
    version: Annotated[str, option("--number", "The number of the version, or latest.")] = "latest",
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Print a schema. Exit code: 3 if there is none.

    Examples:
        holdfast schema show ./data orders-value > order.avsc
    """
    with opened_broker(folder, wait=wait) as broker:
        try:
            found = broker.schemas.get(subject, version)
        except NotFound as error:
            output.note(str(error))
            return output.NOTHING_THERE
    if as_json:
        output.print_json(_document(found))
    else:
        for line in found.text.splitlines():
            output.say(output.safe(line))
    return output.OK


@app.command("register")
def register_command(
    folder: DataFolder,
    subject: Subject,
    file: SchemaFile,
    kind: KindName = None,
    references: References = [],  # noqa: B006
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Register a schema as the newest version of a subject, and print its id. The folder is created if needed.

    Examples:
        holdfast schema register ./data orders-value order.avsc
    """
    text, of_kind = _read(file, kind)
    with opened_broker(folder, wait=wait, create=True) as broker:
        made = broker.schemas.register(subject, text, kind=of_kind, references=_references(references))
    if as_json:
        output.print_json(_document(made))
    else:
        output.say(f"{output.safe(made.subject)} version {made.version} has the id {made.id}")
    return output.OK


@app.command("check")
def check_command(
    file: SchemaFile,
    registry: Annotated[
        str | None, option("--registry PLACE", "Compare with a subject of this data folder or server.")
    ] = None,
    subject: Annotated[str | None, option("--subject", "The subject; by default the file's name.")] = None,
    older: Annotated[
        str | None, option("--older DIR", "Compare with the files in this folder: by name, the newest version last.")
    ] = None,
    level: Annotated[
        str | None, option("--level", "The compatibility for --older: backward, forward, full, also with _transitive.")
    ] = None,
    kind: KindName = None,
    references: References = [],  # noqa: B006
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Check a schema, and whether it is compatible with earlier versions; nothing is registered. For CI.

    Prints a line for each problem, which names the field. Exit code: 0 if all is well, 1 if it is not compatible,
    2 if it is no schema.

    Examples:
        holdfast schema check order.avsc --registry http://127.0.0.1:7700 --subject orders-value
        holdfast schema check order.avsc --older schemas/order --level full_transitive
    """
    text, of_kind = _read(file, kind)
    if level is not None and older is None:
        raise InvalidRequest("--level is for --older: in a registry, `holdfast schema compat` sets it")
    if references and registry is None:
        raise InvalidRequest("--reference needs --registry, where the schemas are that it names")
    problems: list[str] = []
    if registry is not None:
        name = check_subject(Path(file).stem if subject is None else subject)
        with opened_broker(registry, wait=wait) as broker:
            problems += broker.schemas.problems(name, text, kind=of_kind, references=_references(references))
    else:
        compiled = compile_schema(Schema(of_kind, text))
        if older is not None:
            problems += _compared(compiled, Path(older), check_level(level or "BACKWARD"))
    if as_json:
        output.print_json({"file": file, "compatible": not problems, "problems": problems})
    else:
        for each in problems:
            output.say(f"{output.safe(file)}: {output.safe(each)}")
        if not problems:
            output.note(f"{output.safe(file)} is compatible" if registry or older else f"{output.safe(file)} is valid")
    return _INCOMPATIBLE if problems else output.OK


@app.command("compat")
def compat_command(
    folder: DataFolder,
    subject: Annotated[str | None, option("--subject", "The subject; the whole registry by default.")] = None,
    level: Annotated[
        str | None, option("--set LEVEL", "none, backward, forward or full, also with _transitive; default removes it.")
    ] = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Print the compatibility level that applies, or set it.

    Examples:
        holdfast schema compat ./data --subject orders-value --set full
    """
    wanted = None if level in (None, "default") else check_level(level)
    with opened_broker(folder, wait=wait) as broker:
        if level is not None:
            broker.schemas.set_level(wanted, subject)
        found = broker.schemas.level(subject)
    if as_json:
        output.print_json({"subject": subject, "level": found})
    else:
        output.say(found)
    return output.OK


@app.command("rm")
def rm_command(
    folder: DataFolder,
    subject: Subject,
    version: Annotated[str | None, option("--number", "Only this version.")] = None,
    permanent: Annotated[bool, option("--permanent", "Remove for good what is deleted already.")] = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Delete a subject, or a version of it. Messages that carry the id can be read until it is removed for good.

    Exit code: 3 if there is none.

    Examples:
        holdfast schema rm ./data orders-value
        holdfast schema rm ./data orders-value --permanent
    """
    with opened_broker(folder, wait=wait) as broker:
        try:
            numbers = broker.schemas.delete(subject, version, permanent=permanent)
        except NotFound as error:
            output.note(str(error))
            return output.NOTHING_THERE
    if as_json:
        output.print_json({"subject": subject, "deleted": numbers})
    else:
        what = "removed" if permanent else "deleted"
        output.say(f"{what} {output.safe(subject)}, version {', '.join(map(str, numbers))}")
    return output.OK


def _read(file: str, kind: str | None) -> tuple[str, Kind]:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file} is not text in UTF-8") from None
    found = _ENDS.get(Path(file).suffix.lower()) if kind is None else check_kind(kind)
    if found is None:
        raise InvalidRequest(f"the type of {file} is not clear from its name: give --type avro, json or protobuf")
    return text, found


def _compared(compiled: CompiledSchema, folder: Path, level: Level) -> list[str]:
    """Return what speaks against a schema, compared with the files of a folder."""
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is not a folder: give the one that has the earlier versions")
    kind = compiled.schema.kind
    files = [each for each in folder.iterdir() if _ENDS.get(each.suffix.lower()) == kind]
    if not files:
        raise InvalidRequest(f"{folder} has no {kind} schemas: its files must end in {_end_of(kind)}")
    files.sort(key=lambda each: [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", each.name)])
    chosen = reversed(files) if level.endswith("_TRANSITIVE") else files[-1:]
    earlier = [(each.name, compile_schema(Schema(kind, _read(str(each), None)[0]))) for each in chosen]
    return [f"{name}: {problem}" for name, each in earlier for problem in incompatibilities(compiled, each, level)]


def _end_of(kind: Kind) -> str:
    return next(end for end, each in _ENDS.items() if each == kind)


def _references(given: list[str]) -> list[Reference]:
    found = []
    for each in given:
        parts = _REFERENCE.fullmatch(each)
        if parts is None:
            raise InvalidRequest(f"--reference {each!r} cannot be used: write NAME=SUBJECT:VERSION")
        found.append(Reference(parts["name"], parts["subject"], int(parts["version"])))
    return found


def _document(version: SchemaVersion) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(version)
    return found
