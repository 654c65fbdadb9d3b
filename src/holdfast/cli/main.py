"""The entry point of the command line: the list of commands, how one is found and run, and how errors are reported.

Only the module of the command that runs is imported, which is why the summaries that `holdfast --help` prints stand
here; a test keeps them equal to those in the commands' own docstrings.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Final, NamedTuple

from holdfast import __version__
from holdfast.cli.output import NOT_DONE, OK, exit_code
from holdfast.cli.parsing import HELP_ROW, Command, Section, Typed, UsageError, argument, columns, nearest, paragraphs
from holdfast.later import run_one_command


class Entry(NamedTuple):
    """A command or a section of commands: where it is, and its summary."""

    where: str
    about: str


COMMANDS: Final[dict[str, dict[str, Entry]]] = {
    "Use queues": {
        "put": Entry("use.put:put_command", "Put messages into a queue."),
        "get": Entry("use.get:get_command", "Take the next message, or several."),
        "ack": Entry("use.get:ack_command", "Confirm that messages are done."),
        "nack": Entry("use.get:nack_command", "Report that messages failed, so that they are retried."),
        "reject": Entry("use.get:reject_command", "Send messages straight to the dead letters."),
        "defer": Entry("use.get:defer_command", "Return messages for later, without counting an attempt."),
        "extend": Entry("use.get:extend_command", "Extend the lease of messages."),
        "worker": Entry("use.consume:worker_command", "Run a Python function on each message."),
        "produce": Entry("use.put:produce_command", "Publish messages to a topic, in batches."),
        "consume": Entry("use.consume:consume_command", "Print the messages of a topic, alone or as a group."),
        "lock": Entry("use.locks:lock_app", "Locks with leases and fencing numbers."),
        "state": Entry("use.locks:state_app", "JSON documents with versions."),
        "transaction": Entry("use.transactions:app", "Messages, acks and documents that take effect together."),
        "schedule": Entry("use.schedules:app", "Messages that are published at certain times."),
        "schema": Entry("use.schemas:app", "Schemas of message bodies: versions, compatibility."),
    },
    "Look": {
        "ls": Entry("look.messages:ls_command", "List messages: ready, leased, delayed, dead or done."),
        "show": Entry("look.messages:show_command", "Show everything about one message."),
        "search": Entry("look.messages:search_command", "Find messages in all queues, whatever their phase."),
        "peek": Entry("look.messages:peek_command", "Show the next messages without taking them."),
        "tail": Entry("use.consume:tail_command", "Print the newest messages, and follow new ones."),
        "stats": Entry("look.stats:stats_command", "Count the messages of a queue by phase."),
        "top": Entry("look.stats:top_command", "Watch all queues: how full they are, and how fast they move."),
        "trace": Entry("look.trace:app", "What happened to messages, step by step."),
        "log": Entry("look.log:app", "Look inside a log."),
    },
    "Operate": {
        "dead": Entry("operate.queue:dead_app", "Dead letters: list, inspect, redrive and drop them."),
        "cancel": Entry("operate.queue:cancel_command", "Cancel messages that nobody is working on."),
        "take-back": Entry("operate.queue:take_back_command", "Take leased messages back from their consumers."),
        "run-now": Entry("operate.queue:run_now_command", "Make delayed messages ready now."),
        "pause": Entry("operate.queue:pause_command", "Stop handing out messages; publishing continues."),
        "resume": Entry("operate.queue:resume_command", "Hand out messages again after `pause`."),
        "workers": Entry("serve:workers_command", "List, drain, stop or resume workers."),
        "purge": Entry("operate.queue:purge_command", "Drop every waiting message of a queue."),
        "seek": Entry("operate.queue:seek_command", "Move a queue's position, to replay or to skip messages."),
        "topic": Entry("operate.topics:topic_app", "Topics: create, inspect, change and delete them."),
        "group": Entry("operate.topics:group_app", "Consumer groups: their lag, and their position."),
        "settings": Entry("operate.settings:settings_command", "Show or change the settings of a queue."),
        "config": Entry("operate.settings:settings_file_app", "The settings file, and the settings in force."),
        "profile": Entry("operate.settings:app", "Named places and their credentials."),
    },
    "Serve": {
        "serve": Entry("serve:serve_command", "Serve a data folder over HTTP, with the console at /ui."),
        "cluster": Entry("operate.cluster:app", "A cluster: several servers on one store."),
        "ui": Entry("serve:ui_command", "Open the console of a data folder on this machine."),
        "status": Entry("serve:status_command", "Show how a server is doing."),
        "waiters": Entry("serve:waiters_command", "Show who is waiting for messages on a server."),
        "audit": Entry("serve:audit_command", "Show who changed what on a server."),
        "token": Entry("operate.token:app", "Manage tokens: who may call a server, and what they may do."),
    },
    "Pipelines": {
        "pipeline": Entry("pipeline:app", "Pipelines from queues to tables and back, on Spark."),
    },
    "Maintain": {
        "backup": Entry("operate.backup:app", "Backups of a data folder: take, list and verify them."),
        "restore": Entry("operate.backup:restore_command", "Restore a data folder as it was at a given time."),
        "check": Entry("operate.check:check_command", "Check every byte of a queue or a log."),
        "repair": Entry("operate.check:repair_command", "Repair a damaged queue or log."),
        "compact": Entry("operate.queue:compact_command", "Free the disk space of messages that are done."),
        "apply-retention": Entry("operate.queue:apply_retention_command", "Apply the retention settings now."),
        "doctor": Entry("operate.measure:doctor_command", "Measure the disk under a folder, and warn about risks."),
        "bench": Entry("operate.measure:bench_command", "Measure how fast this machine, folder or server is."),
        "completion": Entry("opening:completion_command", "Print the script that completes commands in a shell."),
        "help": Entry("main:help_command", "Explain a command or a topic."),
    },
}
ENTRIES: Final = {name: entry for group in COMMANDS.values() for name, entry in group.items()}
# A command looks for garbage only after it has made this many objects more than it has freed: loading an engine makes
# most of them, and none is garbage.
_OBJECTS_BETWEEN_SEARCHES: Final = 50_000
# Other names of commands: what people type who come from elsewhere.
ALIASES: Final = {"list": "ls"}

_COMPLETING: Final = "_HOLDFAST_COMPLETE"
_ABOUT: Final = "Durable queues and topics, in a folder or on a server."
_OPTIONS: Final = (
    ("--at PLACE", "The place to work on, instead of the command's first argument."),
    ("--profile NAME", "Use the place of this profile."),
    ("--trust-folder", "Use a folder even if other users own it or may write to it."),
    ("--version", "Print the version."),
    HELP_ROW,
)
COMMAND_NAMES: Final = tuple(ENTRIES)
ROOT_OPTIONS: Final = ("--at", "--profile", "--trust-folder", "--version", "--help")
_EXAMPLES: Final = """\
Examples:
  holdfast put jobs 'hello'          put a message into the queue in ./jobs
  holdfast get jobs --ack            take the next message, and ack it
  holdfast ls http://host:7700/jobs  list the messages of a queue on a server
  holdfast help places               explain a topic: bodies, durability,
                                     environment, json or places
"""


TOPICS: Final = {
    "places": """\
Most commands work on a PLACE, their first argument. It is one of these:

  ./data                          a data folder on this machine
  http://127.0.0.1:7700           a server
  https://host/jobs               a server, and a queue there
  unix:/run/holdfast.sock         a server that listens on a Unix socket
  @                               the default place

The default place is $HOLDFAST_URL, or that of the profile chosen with `holdfast profile use`. If there is one, you can
leave the place out, and a plain name such as `jobs` is a queue there; write ./jobs for a folder. Without a default
place, `jobs` is the folder ./jobs.

`--at PLACE` and `--profile NAME` name the place instead of the first argument.

One process owns a folder at a time. If another process has it open, commands connect to that process; if it accepts no
connections, they wait for `--wait` and then fail. Commands that only read need no lock.
""",
    "durability": """\
A message is stored when `put` returns. Each program chooses which failures it survives: with `put --durability`, or
with the setting `durability` in the settings file.

  fsync      survives a power cut: each call waits for the disk
  interval   survives kill -9; after a power cut, the last second or so may
             be missing (the setting sync_interval_ms)
  os         survives kill -9; a power cut may lose what the system has not
             written to the disk yet

`put --acks` takes other names for the same: all for fsync, leader and none for os.

`holdfast doctor DIR` measures what fsync costs on your disk, and `holdfast bench DIR` how fast each of them is.
""",
    "bodies": """\
A body is any sequence of bytes. `put` takes it from its arguments, from files (--file) or from stdin; with --lines,
each line is a message, and with --jsonl, each line is a message as JSON.

`get` prints the body after the message's other details. `get --raw` prints only the body, byte for byte, and
`get --out FILE` writes it to a file. Bodies that are not UTF-8 text are escaped in tables, and are in base64 in JSON,
as `body_base64`.

The `bodies` setting of a queue (bytes, text or json) says what its workers get.
""",
    "json": """\
With --json, a command prints JSON: one object per line, in ASCII. Errors are objects on stderr:
{"error": {"code": ..., "message": ...}}. Times are ISO 8601 in UTC; a name that ends in _ms is milliseconds since 1970.

  holdfast ls jobs --json | jq -r .id

The lines that `put --jsonl` reads have these names; only a body is required:

  body, body_base64 or json       the content; `null` as body is a tombstone
  key, priority, headers          headers are {"name": "value"}
  delay, at, ttl                  as in --delay, --due and --ttl
  dedup_id, correlation_id

Exit codes: 0 done, 1 damage found, 2 not done, 3 nothing there, 130 interrupted.
""",
    "environment": """\
  HOLDFAST_URL           the default place
  HOLDFAST_TOKEN         the token to send to a server
  HOLDFAST_TLS_CA        the certificates to trust
  HOLDFAST_TLS_CERT      your client certificate
  HOLDFAST_TLS_KEY       its key
  HOLDFAST_CONFIG        the settings file
  HOLDFAST_PROFILES      the file with the profiles
  HOLDFAST_BROKER_TRUST_FOLDER
                         use folders that other users may write to
  HOLDFAST_TRACEBACK     print a traceback if there is a bug
  NO_COLOR               print without colours
  COLUMNS                the width of tables and help

`holdfast get --export` sets HOLDFAST_QUEUE and HOLDFAST_RECEIPT, so that `ack`, `nack` and the others need no
arguments. Every setting has a variable, too: see `holdfast config show`.
""",
}


def _help_names(typed: Typed, incomplete: str) -> list[str]:
    """Return the commands and topics, or the commands of a section, whose names begin with this."""
    known: Iterable[str] = [*ENTRIES, *TOPICS]
    if typed.words:
        found = find(typed.words)[0] if typed.words[0] in ENTRIES else None
        known = found.functions if isinstance(found, Section) else ()
    return [name for name in known if name.startswith(incomplete)]


def help_command(
    words: Annotated[
        list[str] | None,
        argument("TOPIC", "A command, such as `dead ls`, or a topic.", complete=_help_names),
    ] = None,
) -> int:
    """Explain a command or a topic.

    Topics: bodies, durability, environment, json, places.

    Examples:
        holdfast help put
        holdfast help dead redrive
        holdfast help places
    """
    if not words:
        sys.stdout.write(root_help())
    elif words[0] in TOPICS:
        sys.stdout.write(paragraphs(TOPICS[words[0]].rstrip()) + "\n")
    elif ALIASES.get(words[0], words[0]) not in ENTRIES:
        known = [*TOPICS, *ENTRIES]
        raise UsageError(f"there is no command and no topic {words[0]}{nearest(words[0], known)}")
    else:
        found, path, rest = find(words)
        if rest:
            hint = nearest(rest[0], found.functions) if isinstance(found, Section) else ""
            raise UsageError(f"there is no command {' '.join(['holdfast', *words])}{hint}", path)
        sys.stdout.write(found.help(path) if isinstance(found, Section) else found.help())
    return OK


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The caller may have closed any of them.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # File names need not be valid text, and a terminal need not support every character.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if arguments is not None:
        sys.exit(_exit_code(given, alone=False))
    # This process is for one command. Nothing that it loads is garbage, and at its end everything is: looking for
    # cycles in it would take a fifth of the time of a quick command.
    gc.disable()
    code = _exit_code(given, alone=True)
    gc.freeze()
    sys.exit(code)


def _load_msgspec() -> None:
    """Load msgspec without what it brings along for other uses, which takes longer to load than all the rest of it.

    What it takes from typing_extensions if it can, the standard library has since Python 3.11. Its `uuid` asks
    platform for one word. Schemas and descriptions of types are for servers: they are loaded on first use. Nobody else
    loads anything meanwhile: this process has one thread yet.
    """
    absent = {name: stand_in for name, stand_in in _stand_ins().items() if name not in sys.modules}
    sys.modules.update(absent)
    importlib.import_module("msgspec")
    for name in absent:
        del sys.modules[name]


def _stand_ins() -> dict[str, Any]:
    """Return what stands for modules while msgspec is loaded."""

    def later(name: str, attribute: str) -> Any:
        return getattr(importlib.import_module(name), attribute)

    def schema(*arguments: Any, **more: Any) -> Any:
        return later(schemas.__name__, "schema")(*arguments, **more)

    def schema_components(*arguments: Any, **more: Any) -> Any:
        return later(schemas.__name__, "schema_components")(*arguments, **more)

    platform, inspect, schemas = map(ModuleType, ("platform", "msgspec.inspect", "msgspec._json_schema"))
    platform.system = lambda: os.uname().sysname  # type: ignore[attr-defined]
    inspect.__getattr__ = partial(later, inspect.__name__)  # type: ignore[method-assign]
    schemas.schema, schemas.schema_components = schema, schema_components  # type: ignore[attr-defined]
    missing = {"typing_extensions": None}  # as if it were not installed
    return missing | {module.__name__: module for module in (platform, inspect, schemas)}


def _exit_code(arguments: list[str], *, alone: bool) -> int:
    return exit_code(lambda: _run(arguments, alone=alone), as_json="--json" in _options_in(arguments))


def _run(arguments: list[str], *, alone: bool) -> int:
    """Run the command; `alone` in this process, so that nothing in it is anybody else's."""
    if _COMPLETING in os.environ:
        from holdfast.cli.opening import print_completions

        return print_completions(os.environ[_COMPLETING])
    root, rest = root_options(arguments)
    if root.get("version"):
        sys.stdout.write(f"holdfast {__version__}\n")
        return OK
    if root.get("help") or not rest:
        sys.stdout.write(root_help())
        return OK if root.get("help") else NOT_DONE
    if root.get("trust_folder"):
        from holdfast.env.process import set_variable
        from holdfast.storage.files import TRUST

        set_variable(TRUST, "true")
    if alone:
        run_one_command()
        _load_msgspec()
    found, path, words = find(rest)
    wants_help = _asks_for_help(words)
    if isinstance(found, Section):
        if words and not wants_help:
            raise UsageError(f"there is no command {path} {words[0]}{nearest(words[0], found.functions)}", path)
        sys.stdout.write(found.help(path))
        return OK if wants_help else NOT_DONE
    if wants_help:
        sys.stdout.write(found.help())
        return OK
    values = found.values(found.parse(words, root))
    if alone:
        gc.freeze()
        gc.set_threshold(_OBJECTS_BETWEEN_SEARCHES)
        gc.enable()
    return exit_code(lambda: found.call(values), as_json=bool(values.get("as_json")))


def _asks_for_help(words: Sequence[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(_options_in(words))


def _options_in(words: Sequence[str]) -> Sequence[str]:
    """The words that may be options: those before `--`."""
    return words[: words.index("--")] if "--" in words else words


def root_options(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options before the command, and the rest."""
    found: dict[str, Any] = {}
    words = list(arguments)
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        if name in ("--at", "--profile"):
            if not equals and not words:
                raise UsageError(f"{name} needs a value")
            found["at" if name == "--at" else "profile_name"] = value if equals else words.pop(0)
        elif name in ("--help", "-h", "--version", "--trust-folder") and not equals:
            found["help" if name == "-h" else name.strip("-").replace("-", "_")] = True
        else:
            raise UsageError(f"there is no option {name} before a command{nearest(name, ROOT_OPTIONS)}")
    return found, words


def find(words: Sequence[str]) -> tuple[Command | Section, str, list[str]]:
    """Return the command or section that these words name, its path, and the words after its name."""
    name, *rest = words
    name = ALIASES.get(name, name)
    if name not in ENTRIES:
        raise UsageError(f"there is no command {name}{nearest(name, [*ENTRIES, *ALIASES])}")
    module, _, attribute = ENTRIES[name].where.partition(":")
    found = getattr(importlib.import_module(f"holdfast.cli.{module}"), attribute)
    path = f"holdfast {name}"
    if isinstance(found, Section):
        name = ALIASES.get(rest[0], rest[0]) if rest else ""
        if name in found.functions:
            rest = rest[1:]
        elif found.usual and rest and rest[0] not in HELP_ROW[0].split(", "):
            name = found.usual
        else:
            return found, path, rest
        found, path = found.functions[name], f"{path} {name}"
    from holdfast.cli.places import PlacedCommand

    return PlacedCommand(path, found), path, rest


def tree() -> Mapping[str, Command | Section]:
    """Return every command and section by the words that name it. Imports all of them."""
    found: dict[str, Command | Section] = {}
    for name in ENTRIES:
        top = found[name] = find([name])[0]
        if isinstance(top, Section):
            found |= {f"{name} {child}": find([name, child])[0] for child in top.functions}
    return found


def root_help() -> str:
    """Return the help of the whole program."""
    label = max(map(len, ENTRIES))
    parts = ["Usage: holdfast COMMAND [ARGUMENTS] [OPTIONS]", paragraphs(_ABOUT)]
    for group, entries in COMMANDS.items():
        parts.append(f"{group}:\n{columns([(name, entry.about) for name, entry in entries.items()], label)}")
    parts.append(f"Options:\n{columns(_OPTIONS)}")
    parts += [_EXAMPLES.rstrip(), paragraphs("`holdfast COMMAND --help` explains a command.")]
    return "\n\n".join(parts) + "\n"
