"""Opening a data folder for the duration of one command, and finding the topic and group that it works on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import holdfast
from holdfast.api import port_of
from holdfast.api.drafts import Bodies, parse_duration
from holdfast.api.topics import topic_settings
from holdfast.broker.folder import layout
from holdfast.cli.output import OK, note, safe
from holdfast.cli.parsing import Parameter, Section, Typed, UsageError, argument, option
from holdfast.cli.places import AT, PLACE, PROFILE, connected, place_of, queue_of, said_or_usual, usual_place
from holdfast.client.opening import is_address
from holdfast.config.settings_file import read_settings
from holdfast.env import real_world
from holdfast.env.process import environment
from holdfast.errors import Busy, Forbidden, HoldfastError, InvalidRequest, NotAQueue, UnknownGroup, UnknownTopic
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.storage.files import is_log, join, translated

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine

# `holdfast completion`, and the words that a shell completes.

Shell: TypeAlias = Literal["bash", "zsh", "fish"]
# What a shell calls to complete a line: it gets the line up to the cursor, and prints a word a line.
_SCRIPTS: Final = {
    "bash": """\
_holdfast_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(_HOLDFAST_COMPLETE=bash _HOLDFAST_LINE="${COMP_LINE:0:COMP_POINT}" "$1" 2>/dev/null))
}
complete -o default -o nosort -F _holdfast_complete holdfast
""",
    "zsh": """\
#compdef holdfast
_holdfast() {
    local -a found
    found=(${(f)"$(_HOLDFAST_COMPLETE=zsh _HOLDFAST_LINE="${LBUFFER}" holdfast 2>/dev/null)"})
    if (( ${#found} )); then compadd -U -V holdfast -a found; else _files; fi
}
if [ "$funcstack[1]" = "_holdfast" ]; then _holdfast "$@"; else compdef _holdfast holdfast; fi
""",
    "fish": """\
function __holdfast_complete
    set -lx _HOLDFAST_COMPLETE fish
    set -lx _HOLDFAST_LINE (commandline -cp)
    holdfast 2>/dev/null
end
complete -c holdfast -a '(__holdfast_complete)'
""",
}
_LINE: Final = "_HOLDFAST_LINE"


def completion_command(shell: Annotated[Shell, argument("SHELL", "bash, zsh or fish.")]) -> int:
    """Print the script that completes commands in a shell.

    It completes commands, options, and the names of topics and groups, in a folder or on a server.

    Examples:
        source <(holdfast completion bash)    # add this line to ~/.bashrc
        source <(holdfast completion zsh)     # add this line to ~/.zshrc
        holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    sys.stdout.write(_SCRIPTS[shell])
    return OK


def print_completions(shell: str) -> int:
    """Print what the last word of a line may become, a word a line."""
    words = _words(os.environ.get(_LINE, ""))[1:] or [""]
    incomplete = words[-1]
    # Bash takes what follows a colon for a word of its own.
    known = incomplete.rpartition(":")[0] + ":" if shell == "bash" and ":" in incomplete else ""
    with suppress(OSError, HoldfastError, UsageError):  # a shell wants names, not errors
        for found in completions(words[:-1], incomplete):
            sys.stdout.write(f"{found.removeprefix(known)}\n")
    return OK


def _words(line: str) -> list[str]:
    """Split a line as a shell does; its last word may be unfinished."""
    import shlex

    for end in ("", "'", '"'):
        with suppress(ValueError):
            return [*shlex.split(line + end), *([""] if not end and line.endswith((" ", "\t")) else [])]
    return line.split()


def completions(words: Sequence[str], incomplete: str) -> list[str]:
    """Return what the last word may become, given the words before it."""
    from holdfast.cli.main import COMMAND_NAMES, ROOT_OPTIONS, find, root_options

    root, rest = root_options(words)
    if not rest:
        return _beginning(ROOT_OPTIONS if incomplete.startswith("-") else COMMAND_NAMES, incomplete)
    command, _, rest = find(rest)
    if isinstance(command, Section):
        return _beginning(command.functions, incomplete)
    if incomplete.startswith("-"):
        return _beginning([*command.options, "--help"], incomplete)
    waiting = command.options.get(rest[-1]) if rest else None
    if waiting is not None and waiting.kind is not bool:
        return _values(waiting, command.parse(rest[:-1], root), incomplete)
    typed = command.parse(rest, root)
    placed = PROFILE in {each.name for each in command.parameters}
    if placed and (typed.options.get(AT) or typed.options.get(PROFILE) or root):
        typed.words.insert(0, "")
    if placed and not typed.words:
        return _places(incomplete)
    number = min(len(typed.words), len(command.arguments) - 1)
    return _values(command.arguments[number], typed, incomplete) if number >= 0 else []


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _values(parameter: Parameter, typed: Typed, incomplete: str) -> list[str]:
    if parameter.choices:
        return _beginning(parameter.choices, incomplete)
    complete = parameter.declared.complete
    return [] if complete is None else complete(typed, incomplete)


def _places(incomplete: str) -> list[str]:
    """Return the queues of a server whose address is typed, or those of the default place."""
    if is_address(incomplete):
        server, slash, beginning = incomplete.rpartition("/")
        if not slash or server.endswith("/"):
            return []
        return [f"{server}/{name}" for name in _matching((name for name, _ in _topics_of_server(server)), beginning)]
    usual = usual_place()
    if usual is None or "/" in incomplete:
        return []
    return _matching(_topics_at(usual), incomplete)


def topic_names(typed: Typed, incomplete: str) -> list[str]:
    """Return the topics whose names begin with this."""
    place = _place(typed)
    return [] if place is None else _matching(_topics_at(place), incomplete)


def group_names(typed: Typed, incomplete: str) -> list[str]:
    """Return the groups whose names begin with this: of the topic on the command line, or of all topics."""
    return _matching(_groups(typed), incomplete)


def _matching(names: Iterator[str], incomplete: str) -> list[str]:
    found: set[str] = set()
    with suppress(OSError, HoldfastError):  # a shell wants names, not errors
        found.update(name for name in names if name.startswith(incomplete))
    return sorted(found)


def _topics_at(place: str) -> Iterator[str]:
    if is_address(place):
        yield from (name for name, _ in _topics_of_server(place))
    else:
        yield from layout.topics(real_world(), place)


def _topics_of_server(place: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the topics of a server, each with its groups."""
    from holdfast.cli.reading import standing_of

    for topic in standing_of(place).topics():
        yield topic.name, [group.name for group in topic.groups]


def _groups(typed: Typed) -> Iterator[str]:
    place, chosen, world = _place(typed), typed.value("topic"), real_world()
    if place is None:
        return
    if is_address(place):
        for name, groups in _topics_of_server(place):
            yield from groups if chosen in (None, name) else ()
        return
    from holdfast.broker.folder.contents import Catalog, GroupNotes

    catalog = Catalog(world, place)
    for topic in [chosen] if isinstance(chosen, str) else layout.topics(world, place):
        yield from GroupNotes(world, layout.topic_folder(place, topic)).names(catalog.facts(topic).partitions)
    yield from (name for name in layout.names_in(world, join(place, layout.GROUPS)) if not name.startswith("."))


def _place(typed: Typed) -> str | None:
    """Return the place given by an option, or else by the first argument, or the default."""
    named = typed.options.get(PROFILE) or typed.root.get(PROFILE)
    if isinstance(named, str):
        return place_of(named)
    said = typed.options.get(AT) or typed.root.get("at") or next(iter(typed.words), None)
    return said_or_usual(said) if said else usual_place()


# Long enough for another command to finish, short enough to report an owner that stays.
WAIT: Final = "1s"

Folder: TypeAlias = Annotated[str, argument("DIR", "The folder of a queue or a log.")]
DataFolder: TypeAlias = Annotated[str, argument(PLACE, "A data folder, or a server's URL.")]
QueueFolder: TypeAlias = Annotated[
    str, argument(PLACE, "A queue's folder, or a server's URL; see `holdfast help places`.")
]
Topic: TypeAlias = Annotated[
    str | None,
    option("--topic NAME", "The topic, if the place has several.", complete=topic_names),
]
Group: TypeAlias = Annotated[
    str | None,
    option("--group NAME", "The group of the topic; `default` by default.", complete=group_names),
]
PartitionNumber: TypeAlias = Annotated[
    int | None, option("--partition N", "Only this partition of the topic.", least=0)
]
AsJson: TypeAlias = Annotated[bool, option("--json", "Print JSON, one object per line.")]
Wait: TypeAlias = Annotated[
    str,
    option("--wait TIME", "How long to wait if another process has locked the folder."),
]
Where: TypeAlias = Annotated[
    str | None,
    option("--where EXPR", "Only messages that match, such as 'attempts > 2' or 'key == \"a\"'."),
]
Limit: TypeAlias = Annotated[int | None, option("--limit", "At most this many messages.", least=0)]
TlsKey: TypeAlias = Annotated[str | None, option("--tls-key FILE", "Its key, if it is not in the same file.")]
Yes: TypeAlias = Annotated[bool, option("--yes", "Do not ask for confirmation.")]
DryRun: TypeAlias = Annotated[bool, option("--dry-run", "Show what would be done, and change nothing.")]


_LOOK_EVERY_S: Final = 0.02
_MOST_NAMES: Final = 20

_Answer = TypeVar("_Answer")


@contextmanager
def opened_broker(
    place: str, *, wait: str | float = WAIT, create: bool = False, keep: bool = True
) -> Iterator[holdfast.Broker]:
    """Open the broker of a place: a folder, which this process then owns, the folder's owner, or a server.

    If another short command owns the folder, wait a little for it. With `keep`, the upkeep threads run.
    """
    if is_address(place):
        broker = connected(place, _seconds(wait))
    else:
        if not create:
            topics_of(place)
        broker = _folder_or_its_owner(place, _seconds(wait), create=create)
        if keep and not port_of(broker).shared:
            engine_of(broker).keep()
    try:
        yield broker
    finally:
        broker.close()


def _seconds(wait: str | float) -> float:
    return parse_duration(wait, "--wait") if isinstance(wait, str) else wait


def _folder_or_its_owner(folder: str, wait_s: float, *, create: bool) -> holdfast.Broker:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.local.sync.broker import LocalBrokerPort

    settings = read_settings(real_world(), environment()).broker
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return holdfast.Broker(LocalBrokerPort(BrokerEngine.open(folder, create=create, settings=settings)))
        except Busy:
            owner = _owner_at(folder, settings)
            if owner is not None:
                return owner
            if time.monotonic() >= give_up:
                raise
            time.sleep(_LOOK_EVERY_S)


def _owner_at(folder: str, settings: BrokerSettings) -> holdfast.Broker | None:
    """Connect to the process that owns a folder, if it listens."""
    from holdfast.client.shared_folder import client_of_owner, socket_of
    from holdfast.env.sockets import absolute, answers_at  # most folders have no owner to call

    path = absolute(folder.rstrip("/") or "/")
    if not answers_at(socket_of(path)):
        return None
    from holdfast.remote.sync.broker import RemoteBrokerPort

    # It takes over if the owner ends before the command does.
    return holdfast.Broker(RemoteBrokerPort(client_of_owner(path, settings, for_tasks=False)))


def engine_of(broker: holdfast.Broker) -> BrokerEngine:
    """Return the engine of a folder that this process owns."""
    engine: BrokerEngine = port_of(broker).engine
    return engine


def asked(broker: holdfast.Broker, kind: type[_Answer], *path: str | int, **query: Any) -> _Answer:
    """Return a server's answer to a GET that the API has no method for. A folder's owner can answer, too."""
    client = getattr(port_of(broker), "client", None)
    if client is None:
        raise InvalidRequest(
            f"no server and no other process has {broker.folder} open, so there is nothing to ask: start a server, or "
            "name one"
        )
    from holdfast.client.calling import Ask, path_of
    from holdfast.client.network import run

    wait_s = query.get("wait") or 0.0
    answer: _Answer = run(
        client.caller.call(Ask(method="GET", path=path_of(*path, **query), answers=kind, wait_s=wait_s))
    )
    return answer


def trusts_folders() -> bool:
    """Whether other users who may write to a folder are trusted: by --trust-folder, or by the settings."""
    return read_settings(real_world(), environment()).broker.trust_folder


# The topic and the group that a command works on.


class QueueAt(NamedTuple):
    """The group of a topic that a command works on. A command that takes it has all of these arguments."""

    folder: QueueFolder
    topic: Topic = None
    group: Group = None
    wait: Wait = WAIT
    as_json: AsJson = False

    def of(self, message_id: str | None) -> QueueAt:
        """Return this target with the topic that a message id names, unless a topic was given."""
        return self if message_id is None else self._replace(topic=topic_named(self.folder, self.topic, message_id))

    def opened(self) -> AbstractContextManager[holdfast.Group[bytes]]:
        """Open the group, brought up to date."""
        return opened(self.folder, topic=self.topic, group=self.group, wait=self.wait)


@contextmanager
def opened(
    place: str, *, topic: str | None = None, group: str | None = None, wait: str | float = WAIT
) -> Iterator[holdfast.Group[bytes]]:
    """Open a group of a topic, brought up to date."""
    topic = chosen_topic(place, topic)
    with opened_broker(place, wait=wait) as broker:
        yield view(broker, topic, group)


def view(broker: holdfast.Broker, topic: str, group: str | None, *, make: bool = False) -> holdfast.Group[bytes]:
    """Return a group in queue mode, brought up to date; with `make` it is created if it is missing."""
    name = layout.check_name(group or layout.DEFAULT_GROUP, "group")
    try:
        return holdfast.Group(port_of(broker).existing_group(topic, name, Bodies(None)))
    except UnknownGroup:
        there = broker.describe_topic(topic).groups
    # Do not create the default group next to others unless it is named: it would keep every message, unread.
    if make and (group is not None or not there):
        broker.group(topic, name)
        return view(broker, topic, group)
    if there:
        raise UnknownGroup(f"{topic} has no group {name}; choose one with --group: {some_of(there)}")
    word = "" if group is None else f" --group {group}"
    raise UnknownGroup(f"{topic} has no group {name}; it has none in queue mode yet: `holdfast get{word}` creates it")


def is_queue(folder: str) -> bool:
    """Whether the folder holds a queue or topics."""
    world = real_world()
    try:
        return bool(layout.topics(world, folder)) or (
            world.disk.exists(join(folder, layout.TOPICS)) and not is_log(world, folder)
        )
    except OSError:
        return False


def topics_of(folder: str) -> list[str]:
    """Return the topics of a data folder or a server; raises NotAQueue if the folder is not a data folder."""
    if is_address(folder):
        with opened_broker(folder) as broker:
            return broker.topics()
    world = real_world()
    with translated(folder):
        found = layout.topics(world, folder)
        there = world.disk.exists(folder)
    if found or is_queue(folder):
        return found
    if not there:
        raise NotAQueue(f"there is no folder {folder}; `holdfast put` creates a queue, `holdfast topic create` a topic")
    if is_log(world, folder):
        raise NotAQueue(f"{folder} contains a log, not a queue; inspect it with `holdfast log`")
    raise NotAQueue(
        f"{folder} holds no queue; name the folder that `holdfast put` created, the one with {layout.TOPICS}/ in it"
    )


def chosen_topic(place: str, wanted: str | None, *, create: bool = False) -> str:
    """Return the topic that a command works on: the one named, or the only one there is."""
    wanted = wanted or queue_of(place)
    remote = is_address(place)
    if wanted is not None and (remote or (create and not is_queue(place))):
        return layout.check_topic_name(wanted)  # a server reports a missing topic itself
    found = topics_of(place) if remote or not create or is_queue(place) else []
    if wanted is not None:
        if layout.check_topic_name(wanted) not in found and not create:
            raise unknown_topic(place, wanted, found)
        return wanted
    if len(found) > 1:
        raise InvalidRequest(f"{place} has {len(found)} topics; choose one with --topic: {some_of(found)}")
    if found:
        return found[0]
    if create:
        return layout.DEFAULT_TOPIC if remote else layout.topic_for(place)
    raise NotAQueue(f"{place} has no topic yet; create one with `holdfast topic create {place} NAME`")


def topic_named(place: str, wanted: str | None, message_id: str) -> str:
    """Return the topic for a command that takes a message id, since the id names the topic, too."""
    if wanted is None and is_address(place):
        return layout.topic_of_id(message_id).removesuffix(layout.DEAD_SUFFIX)
    if wanted is None and len(found := topics_of(place)) > 1:
        with suppress(HoldfastError):
            name = layout.topic_of_id(message_id).removesuffix(layout.DEAD_SUFFIX)
            if name in found:
                return name
    return chosen_topic(place, wanted)


def unknown_topic(folder: str, name: str, found: Sequence[str]) -> UnknownTopic:
    """Return the error for a topic that does not exist."""
    there = f"known topics: {some_of(found)}" if found else "there is none yet"
    return UnknownTopic(
        f"there is no topic {name} in {folder}; {there}. Create it with `holdfast topic create {folder} {name}`"
    )


def some_of(names: Sequence[str]) -> str:
    """Return the names in one line, or the first few of them."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def log_of(folder: str, topic: str | None = None, partition: int = 0) -> str:
    """Return the path of a partition's log, for commands that only read."""
    return join(layout.partition_folder(folder, chosen_topic(folder, topic), partition), "log")


# Queues that a command creates, and their settings.


def see_to_queue(broker: holdfast.Broker, name: str, changes: Mapping[str, Any] | None = None, *, create: bool) -> bool:
    """Create the queue if there is none; return whether it was created."""
    try:
        broker.describe_topic(name)
    except UnknownTopic:
        if not create:
            raise
        broker.queue(name, **(changes or {}))
        return True
    except Forbidden:
        pass  # a caller that may only publish cannot see topics
    return False


def settings_of(broker: holdfast.Broker, topic: str) -> TopicSettings:
    """Return the settings of a topic."""
    info = broker.describe_topic(topic)
    return topic_settings({**info.settings, "partitions": len(info.partitions)})


# The groups that the message ids or receipts of one call belong to, found by the topics that these name.


class Views:
    """The groups of one place, each opened at first use."""

    def __init__(self, broker: holdfast.Broker, at: QueueAt) -> None:
        self._broker = broker
        self._place, self._topic, self._group = at.folder, at.topic, at.group
        self._known: dict[tuple[str, str | None], holdfast.Group[bytes]] = {}

    def of_id(self, message_id: str) -> holdfast.Group[bytes]:
        """Return the group of a message or a dead letter."""
        return self._view(topic_named(self._place, self._topic, message_id), self._group)

    def of_receipt(self, receipt: str) -> holdfast.Group[bytes]:
        """Return the group of a delivery: the one named, or else the one that has the message."""
        topic = topic_named(self._place, self._topic, receipt.partition("@")[0])
        return self._view(topic, self._group or self._holding(topic, receipt))

    def _holding(self, topic: str, receipt: str) -> str | None:
        """Return the group that issued the receipt; None if no group has the message any more."""
        groups: list[str] = []
        with suppress(Forbidden):  # a caller that may only consume cannot list groups
            groups = self._broker.describe_topic(topic).groups
        holding = [group for group in groups if len(groups) > 1 and self._holds(topic, group, receipt)]
        if len(holding) > 1:
            raise InvalidRequest(
                f"{receipt} could belong to {len(holding)} groups; choose one with --group: {some_of(holding)}"
            )
        if holding:
            return holding[0]
        return None if layout.DEFAULT_GROUP in groups else next(iter(groups), None)

    def _holds(self, topic: str, group: str, receipt: str) -> bool:
        with suppress(HoldfastError):  # using the receipt reports what is wrong with it
            held: bool = port_of(self._view(topic, group)).holds(receipt)
            return held
        return False

    def _view(self, topic: str, group: str | None) -> holdfast.Group[bytes]:
        if (topic, group) not in self._known:
            self._known[topic, group] = view(self._broker, topic, group)
        return self._known[topic, group]


_LOOK_AGAIN_S: Final = 0.1
# How often to open a place again: no log shows that a message was returned.
_OPEN_EVERY_S: Final = 2.0


class OpeningTurns:
    """Opens a place repeatedly while a command waits for something there.

    No other process can use a folder that this one owns, so a waiting command closes it between two turns. If the
    topics are shared with other processes, one turn waits for the whole time.
    """

    def __init__(self, place: str, topic: str | None, timeout_s: float, wait: str | float) -> None:
        self._place = place
        self._topic = topic
        self._timeout_s = timeout_s
        self._wait_s = parse_duration(wait, "--wait") if isinstance(wait, str) else wait
        self.begin()

    def begin(self) -> None:
        """Start the waiting time now."""
        self._idle_from = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._timeout_s - (time.monotonic() - self._idle_from)

    def each(
        self, *, create: bool = False, patient: bool = False
    ) -> Generator[tuple[holdfast.Broker, float], None, None]:
        """Yield the broker and the time to wait, for each turn.

        If the place becomes busy after the first turn, wait for it: until the time is over, or, if `patient`, until it
        is free.
        """
        rest: tuple[dict[int, int], float] | None = None
        while True:
            with ExitStack() as closing:
                try:
                    most_s = self._wait_s if create or patient else max(self._wait_s, self.left_s)
                    broker = closing.enter_context(opened_broker(self._place, wait=most_s, create=create))
                except Busy as busy:
                    if rest is None or not patient:
                        raise
                    self._say(busy)
                    continue
                self._said = False
                shared = port_of(broker).shared
                yield broker, max(self.left_s, 0) if shared else 0
                if shared:
                    return
                rest = self._rest(broker)
            if self.left_s <= 0:
                return
            ends, most_s = rest
            if self._topic is None:
                time.sleep(min(self.left_s, most_s))
            else:
                from holdfast.cli.reading import FolderLogs

                FolderLogs(self._place, self._topic).wait(ends, min(self.left_s, most_s))

    _said = False

    def _say(self, busy: Busy) -> None:
        if not self._said:
            note(f"waiting: {safe(str(busy))}")
        self._said = True

    def _rest(self, broker: holdfast.Broker) -> tuple[dict[int, int], float]:
        """Return the ends of the partitions, and when to look again even if they have not grown."""
        if self._topic is None:
            return {}, _LOOK_AGAIN_S
        due_ms = engine_of(broker).tick()
        ends = {each.number: each.end for each in broker.describe_topic(self._topic).partitions}
        return ends, min(_OPEN_EVERY_S, (due_ms or 60_000) / 1000)
