"""The tables of calls and errors for docs/reference/grpc.md, from the proto file and the face.

`python -m tests.tidy.grpc_reference --write` renews the page; without `--write` it is printed.
"""

from __future__ import annotations

import sys

from holdfast.protocol.media import KINDS
from holdfast.server.grpc.face import code_of
from holdfast.server.routing import status_of_code
from holdfast.v1 import holdfast_pb2 as pb
from tests.tidy.http_reference import all_routes
from tests.tidy.repo import ROOT, with_part

PAGE = ROOT / "docs" / "reference" / "grpc.md"
BEGIN = "<!-- {name}: made by `python -m tests.tidy.grpc_reference --write` -->"
END = "<!-- end of {name} -->"


def with_tables(page: str) -> str:
    """The page, with its tables made anew."""
    for service in pb.DESCRIPTOR.services_by_name:
        page = with_part(page, BEGIN.format(name=service), END.format(name=service), calls_of(service))
    return with_part(page, BEGIN.format(name="errors"), END.format(name="errors"), errors())


def calls_of(service: str) -> str:
    """A row for each call: its request of the HTTP API, and the right that it needs."""
    actions = {(route.method, route.pattern): (route.action, route.summary) for route in all_routes()}
    lines = ["| call | request of the HTTP API | right | |", "|---|---|---|---|"]
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        named = method.GetOptions().Extensions[pb.route]
        if named.path:
            action, summary = actions[named.method, named.path]
            lines.append(f"| `{method.name}` | `{named.method} {named.path}` | {action} | {summary} |")
        else:
            lines.append(f"| `{method.name}` | {STREAMS[method.name]} |")
    return "\n".join(lines)


STREAMS = {
    "PublishStream": "a `POST /v1/queues/{queue}/batch` for each request | publish | Store batches as they come.",
    "Subscribe": "`POST /v1/queues/{queue}/subscribe`, and those that settle | consume | "
    "Deliver messages as they come, and settle them.",
}


def errors() -> str:
    """A row for each status."""
    by_status: dict[str, list[str]] = {}
    for code in sorted(KINDS):
        by_status.setdefault(code_of(code, status_of_code(code)).name, []).append(f"[`{code}`](errors.md#{code})")
    rows = [f"| `{status}` | {', '.join(codes)} |" for status, codes in sorted(by_status.items())]
    return "\n".join(["| status | errors |", "|---|---|", *rows])


if __name__ == "__main__":
    renewed = with_tables(PAGE.read_text("utf-8"))
    if "--write" in sys.argv:
        PAGE.write_text(renewed, "utf-8")
    else:
        sys.stdout.write(renewed)
