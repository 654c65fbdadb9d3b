"""The docs name what the code has, their examples run, and their links lead somewhere."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest

from tests.tidy import markdown, pages, served
from tests.tidy.repo import ROOT, assert_none, files, name_of

REFERENCE = ROOT / "docs" / "reference"

# Of every command that works somewhere; told once, where the whole program is.
OPTIONS_OF_PLACES = frozenset({"--at", "--profile"})

# How a page is run by any Python: `tests.tidy.pages`, on what stdin holds.
RUN_BLOCKS = f"{Path(pages.__file__).read_text('utf-8')}\nimport json\nrun(**json.load(sys.stdin))\n"


def test_every_command_and_option_is_in_the_reference():
    main = importlib.import_module("holdfast.cli.main")
    text = reference("cli.md")
    faults = []
    for command, options in commands(main):
        part = markdown.section(text, titled=command)
        if part is None:
            faults.append(f"`{command}` has no section")
        else:
            written = markdown.code(part)
            said_once = OPTIONS_OF_PLACES if command != "holdfast" else frozenset()
            asked = [option for option in options if option not in said_once]
            faults += [f"`{command}`: {option}" for option in asked if not names(written, option)]
    assert_none(
        faults,
        "Add to docs/reference/cli.md: a heading that holds the command as code (## `holdfast check`), "
        "and each option as code below it.",
    )


def test_every_setting_is_in_the_reference():
    written = markdown.code(reference("settings.md"))
    faults = [
        f"{struct.__name__}.{field}"
        for struct in classes_in("holdfast.settings")
        for field in getattr(struct, "__struct_encode_fields__", ())
        if not names(written, field)
    ]
    assert_none(faults, "Add each of these settings, as code, to docs/reference/settings.md.")


def test_every_error_code_is_in_the_reference():
    written = markdown.code(reference("errors.md"))
    faults = [
        f"{error.__name__}: {error.code}"
        for error in classes_in("holdfast.errors")
        if issubclass(error, Exception) and hasattr(error, "code") and not names(written, error.code)
    ]
    assert_none(faults, "Add each of these codes, as code, to docs/reference/errors.md.")


def test_every_error_code_has_a_section_with_its_class_and_status():
    status_of_code = importlib.import_module("holdfast.server.routing").status_of_code
    kinds = importlib.import_module("holdfast.protocol.media").KINDS
    text = reference("errors.md")
    faults = []
    for code, kind in kinds.items():
        retryable = "retryable" if kind.retryable else "not retryable"
        facts = f"`{kind.__name__}`, HTTP {status_of_code(code)}, {retryable}."
        part = markdown.section(text, titled=code) or ""
        again = "yes" if kind.retryable else "no"
        row = f"| [`{code}`](#{code}) | `{kind.__name__}` | {status_of_code(code)} | {again} |"
        faults += [f"{code}: {what}" for what in (facts, "**Do**: ") if what not in part]
        faults += [row] if row not in text else []
    assert_none(faults, "Each code has a section in docs/reference/errors.md that says this, and a row in its table.")


def test_every_metric_is_in_the_reference():
    metrics = importlib.import_module("holdfast.broker.metrics")
    group = importlib.import_module("holdfast.broker.group")
    written = markdown.code(reference("metrics.md"))
    instruments = [instrument.name for instrument in metrics.Metrics()._instruments]
    faults = [name for name in instruments if not names(written, name)]
    for struct in (metrics.MetricsSnapshot, metrics.Times, group.QueueStats):
        faults += [f"{struct.__name__}.{field}" for field in struct.__struct_fields__ if not names(written, field)]
    assert_none(faults, "Add each of these, as code, to docs/reference/metrics.md.")


def test_every_exported_name_is_in_the_reference():
    holdfast = importlib.import_module("holdfast")
    written = "\n".join(markdown.code(page.read_text("utf-8")) for page in sorted(REFERENCE.glob("*.md")))
    exported = [*holdfast.__all__, *(f"aio.{name}" for name in holdfast.aio.__all__)]
    exported += importlib.import_module("holdfast.testing").__all__
    assert_none(
        [name for name in exported if not names(written, name)],
        "Add each of these, as code, to docs/reference/queue.md (an error: to errors.md).",
    )


# Public to the rest of the package, and none of the users' business.
INTERNAL = frozenset({"await_all", "call_when_done", "disown", "end", "open", "round"})


def test_every_method_and_argument_of_a_queue_is_in_the_reference():
    holdfast = importlib.import_module("holdfast")
    dead, letters = importlib.import_module("holdfast.api.sync.group"), importlib.import_module("holdfast.api.listing")
    written = markdown.code(reference("queue.md"))
    faults = []
    for kind in (holdfast.Queue, holdfast.Message, holdfast.Stored, dead.DeadLetters, holdfast.DeadLetter):
        faults += unwritten(kind, written)
    for struct in (holdfast.NewMessage, holdfast.Stored, holdfast.Compacted, holdfast.DeadGroup, letters.Redriven):
        faults += [f"{struct.__name__}.{field}" for field in struct.__struct_fields__ if not names(written, field)]
    faults += [f"open: {name}" for name in inspect.signature(holdfast.open).parameters if not names(written, name)]
    assert_none(faults, "Add each of these, as code, to docs/reference/queue.md.")


def test_every_method_and_argument_of_a_broker_is_in_the_reference():
    holdfast = importlib.import_module("holdfast")
    written = "\n".join(markdown.code(reference(name)) for name in ("broker.md", "queue.md", "traces.md"))
    faults = []
    for name in ("Broker", "Group", "Producer", "Consumer", "StreamMessage", "TopicInfo", "GroupInfo", "TraceStep"):
        faults += unwritten(getattr(holdfast, name), written)
    locks = importlib.import_module("holdfast.api.sync.message")
    for kind in (locks.Locks, locks.Documents, locks.HeldLock, locks.Lock, locks.LockInfo, locks.Document):
        faults += unwritten(kind, written)
    opening = inspect.signature(holdfast.open_broker).parameters
    faults += [f"open_broker: {name}" for name in opening if not names(written, name)]
    assert_none(faults, "Add each of these, as code, to docs/reference/broker.md.")


def test_every_method_and_argument_of_a_worker_is_in_the_reference():
    holdfast = importlib.import_module("holdfast")
    written = markdown.code(reference("worker.md"))
    faults = unwritten(holdfast.Worker, written) + unwritten(holdfast.WorkerHealth, written)
    for kind in (holdfast.Worker, holdfast.Retry, holdfast.Reject):
        faults += [
            f"{kind.__name__}: {name}" for name in inspect.signature(kind).parameters if not names(written, name)
        ]
    assert_none(faults, "Add each of these, as code, to docs/reference/worker.md.")


def unwritten(kind: type, written: str) -> list[str]:
    """The public members of a class, and their arguments, that a page does not name."""
    faults = []
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and name not in INTERNAL:
            arguments = inspect.signature(member).parameters if inspect.isfunction(member) else ()
            faults += [
                f"{kind.__name__}.{name}: {word}"
                for word in (name, *arguments)
                if word != "self" and not names(written, word)
            ]
    return faults


def pages_with_examples() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.is_file() and examples(page)]


def examples(page: Path) -> list[tuple[int, str]]:
    """What a page does, block by block; of a page that needs Spark, only its Python, which has a session."""
    text = page.read_text("utf-8")
    languages = {"python"} if needs_spark(page) else {"python", "console", "sh", "toml", "yaml"}
    found = [
        (block.line, served.program(block, served.given(text)))
        for block in markdown.blocks(text)
        if block.language in languages and not block.skipped
    ]
    return [(line, code) for line, code in found if code]


def needs_spark(page: Path) -> bool:
    """Whether an example starts Spark: tests/spark runs such a page, in the one session that all share."""
    started = re.compile(r"\b(?:pyspark|holdfast\.spark|holdfast pipeline)\b")
    return any(started.search(block.code) for block in markdown.blocks(page.read_text("utf-8")) if not block.skipped)


def test_a_guide_says_which_of_its_commands_are_not_run():
    """A command in a block of plain text is one that nobody has ever tried."""
    command = re.compile(r"^(?:\$ )?(?:holdfast [a-z]|curl |python3? -m|pip )|\$\(holdfast ", re.MULTILINE)
    guides = [page for page in files() if page.suffix == ".md" and page.parent.name in {"tutorial", "how-to"}]
    faults = [
        f"{name_of(page)}:{block.line}"
        for page in guides
        for block in markdown.blocks(page.read_text("utf-8"))
        if block.language in {"", "text", "bash"} and command.search(block.code) and not block.skipped
    ]
    assert_none(faults, "Make this a block of `console` or `sh`, which is run; or say above it why it is not.")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages_with_examples() if not needs_spark(page)], ids=name_of)
def test_the_examples_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path):
    done = run_page(page, cwd=tmp_path)
    if done.returncode != 0:
        pytest.fail(f"{done.stdout}{done.stderr}\nAn example in {name_of(page)} fails.", pytrace=False)


def run_page(page: Path, *, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run the examples of a page from top to bottom, with a server if it asks for one."""
    text = page.read_text("utf-8")
    arguments = served.wanted(text)
    if arguments is None:
        return run_examples(name_of(page), examples(page), cwd=cwd, python=python)
    with served.server(arguments, cwd, python, greeting=served.greeting(text)) as address:
        found = [(line, code.replace(served.ADDRESS, address)) for line, code in examples(page)]
        return run_examples(name_of(page), found, cwd=cwd, python=python)


def run_examples(
    name: str, found: list[tuple[int, str]], *, cwd: Path, python: str = sys.executable, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", RUN_BLOCKS],
        input=json.dumps({"name": name, "blocks": found}),
        cwd=cwd,
        env=served.shell_environment(python, home=cwd),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_every_relative_link_leads_somewhere():
    faults = [
        f"{name_of(page)}:{line}: {target}"
        for page in files()
        if page.suffix == ".md"
        for line, target in markdown.links(page.read_text("utf-8"))
        if not resolves(page, target)
    ]
    assert_none(faults, "There is no such file, or no such heading in it.")


ONCE = "explanation/spark-exactly-once.md"
# On the pages on Spark, only these may come twice.
AT_LEAST_ONCE = {
    "a stream into `foreachBatch` | at least once, unless your function uses the batch number",
    "the sink writes at least once | [exactly once](../explanation/spark-exactly-once.md)",  # Kafka's
}


def test_one_page_says_what_spark_writes_once_and_the_others_refer_to_it():
    wrong = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = page.relative_to(ROOT / "docs").as_posix()
        if "decisions" in name or not (name == ONCE or re.search("spark|pipelines", page.name)):
            continue
        for line in page.read_text().splitlines():
            if re.search("at.least.once", line, re.IGNORECASE) and not any(each in line for each in AT_LEAST_ONCE):
                wrong.append(f"{name}: {line[:100]}")
        says = re.search(r"exactly once|(row|message) once\b", page.read_text(), re.IGNORECASE)
        if says and name != ONCE and ONCE not in page.read_text():
            wrong.append(f"{name}: it says {says[0]!r} and does not refer to {ONCE}")
    assert_none(wrong, "what may come twice, and what not, is said in one table")


def test_every_page_and_example_is_in_an_index():
    docs = ROOT / "docs"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for index in (docs / "README.md", docs / "internals" / "README.md", docs / "decisions" / "README.md")
        for _, target in markdown.links(index.read_text("utf-8"))
    }
    written = [page for page in docs.rglob("*.md") if page.name != "README.md"]
    examples = [page for page in (ROOT / "examples").glob("*.py") if page.name != "demo_spark.py"]  # a part of demo.py
    assert_none(
        sorted(name_of(page) for page in [*written, *examples] if page not in linked),
        "Add each of these to docs/README.md (or that of internals or decisions), or nobody finds it.",
    )


def resolves(page: Path, target: str) -> bool:
    """Whether a link leads to a file (and a heading) of this repository; other links are not followed."""
    if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
        return True
    path, _, anchor = unquote(target).partition("#")
    there = (page.parent / path).resolve() if path else page
    if not there.exists():
        return False
    return not anchor or there.suffix != ".md" or anchor in markdown.anchors(there.read_text("utf-8"))


def reference(name: str) -> str:
    page = REFERENCE / name
    if not page.is_file():
        pytest.fail(f"docs/reference/{name} is not written yet", pytrace=False)
    return page.read_text("utf-8")


def names(written: str, word: str) -> bool:
    """Whether `word` stands there by itself: `--all` is not named by `--all-topics`."""
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", written) is not None


def commands(main: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """Every command, with its options."""
    yield "holdfast", [name for name in main.ROOT_OPTIONS if name != "--help"]
    for name, command in main.tree().items():
        if hasattr(command, "options"):
            yield f"holdfast {name}", list(command.options)


def classes_in(module_name: str) -> list[type[Any]]:
    """The classes that a module, or the modules of a package, define."""
    module = importlib.import_module(module_name)
    found = [module]
    for child in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module_name}."):
        found.append(importlib.import_module(child.name))
    return [
        value
        for each in found
        for value in vars(each).values()
        if inspect.isclass(value) and value.__module__ == each.__name__
    ]
