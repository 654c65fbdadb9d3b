"""Projects of pipelines: from a YAML file, from a Python file, or chained in Python; and how their pipelines run."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from os import PathLike, fspath
from signal import SIGINT, getsignal, signal
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from holdfast.env import World, real_world
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark.pipelines.checkpoint import check_fit, end_run, forget, held, is_half_forgotten, note_run, without
from holdfast.spark.pipelines.python import executed, marked
from holdfast.spark.pipelines.spec import (
    Context,
    Expectation,
    OnFail,
    Outcome,
    Plan,
    Progress,
    Project,
    Spec,
    Summary,
    check_keys,
    check_project,
    from_home,
    kind_named,
    located,
    meant,
    read_options,
)
from holdfast.spark.pipelines.stores import check_reachable, tables_at
from holdfast.spark.session import in_words, keep_pyspark_quiet
from holdfast.storage.files import read_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RESOLVERS: Final = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_LOADER: Final[Any] = type("_Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": _RESOLVERS})


def read_yaml(content: bytes) -> Any:
    """The plain values of a YAML document. Raises yaml.YAMLError, also for a key that occurs twice."""
    loader = _LOADER(content)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: Any, looked_at: set[int]) -> None:
    if id(node) in looked_at or isinstance(node, yaml.ScalarNode):
        return
    looked_at.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(each, looked_at)
        return
    keys = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in keys:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} appears twice", key.start_mark)
        keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        _check_keys(value, looked_at)


_KEYS: Final = ("folder", "lake", "checkpoints", "file", "pipelines")


def read_project(path: str | PathLike[str], world: World | None = None) -> Project:
    """The project that a YAML or Python file declares. Raises BadSettings or InvalidRequest."""
    path = fspath(path)
    world = real_world() if world is None else world
    if world.disk.is_folder(path):
        raise InvalidRequest(f"{path} is a folder: name the file that declares the pipelines, such as pipelines.yaml")
    content = read_file(world.disk, path)
    if content is None:
        raise InvalidRequest(f"there is no file {path}; `holdfast pipeline new NAME` writes one to start from")
    if path.endswith(".py"):
        return _from_python(path)
    return _from_yaml(path, content)


def _from_yaml(path: str, content: bytes) -> Project:
    try:
        document = read_yaml(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise BadSettings(f"{path}{where}: this is not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(document, dict):
        raise BadSettings(f"{path}: it must have the keys {', '.join(_KEYS)}")
    return project_of(document, path)


def project_of(document: dict[Any, Any], where: str) -> Project:
    """The project that a document declares. Its paths are relative to the file, which is named by `where`."""
    check_keys(document, _KEYS, where)
    home = posixpath.dirname(where)
    paths = {}
    for key, said in (("folder", "the data folder"), ("lake", "the folder that tables go to")):
        value = document.get(key)
        if not isinstance(value, str) or not value:
            raise BadSettings(f"{where}: {key} is missing: name {said}")
        paths[key] = from_home(home, value)
    checkpoints = document.get("checkpoints")
    if checkpoints is not None:
        if not isinstance(checkpoints, str) or not checkpoints:
            raise BadSettings(f"{where}: checkpoints must be the name of a folder")
        paths["checkpoints"] = posixpath.normpath(posixpath.join(home, checkpoints))
    found = _own(document.get("file"), home, where)
    entries = document.get("pipelines") or {}
    if not isinstance(entries, dict):
        raise BadSettings(f"{where}: pipelines must be names, each with a kind and options below it")
    pipelines = {spec.name: spec for value in found.values() if (spec := marked(value)) is not None}
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise BadSettings(f"{where}: YAML reads the name of a pipeline as {name!r}: put it in quotes")
        pipelines[name] = _spec(name, entry, found, where)
    if not pipelines:
        raise BadSettings(f"{where}: it declares no pipelines: add one below pipelines")
    return check_project(Project(pipelines=pipelines, where=where, **paths))


def _spec(name: str, entry: Any, functions: Mapping[str, Any], where: str) -> Spec:
    place = f"{where}: {name}"
    if not isinstance(entry, dict) or "kind" not in entry:
        raise BadSettings(f"{place}: say what it does with kind: land, refine, aggregate or another")
    try:
        kind = kind_named(entry["kind"])
    except BadSettings as error:
        raise BadSettings(f"{place}: {error}") from None
    given = {str(key): value for key, value in entry.items() if key != "kind"}
    if entry["kind"] != "python":
        return Spec(name=name, kind=entry["kind"], options=read_options(kind.options, given, place))
    wanted = given.get("function") or name
    function = functions.get(str(wanted)) or functions.get(str(wanted).replace("-", "_"))
    if function is None:
        known = meant(str(wanted), functions) if functions else "; name the Python file with file: at the top"
        raise BadSettings(f"{place}: there is no function {wanted!r} for it{known}")
    declared = marked(function)
    if declared is not None:  # the entry overrides the decorator
        given = {**msgspec.to_builtins(declared.options), **given}
    return Spec(name=name, kind="python", options=read_options(kind.options, given, place), function=function)


def _own(file: Any, home: str, where: str) -> dict[str, Any]:
    """The functions of the user's Python file, by their names."""
    if file is None:
        return {}
    if not isinstance(file, str):
        raise BadSettings(f"{where}: file must be the name of a Python file")
    module = executed(posixpath.join(home, file), where)
    own = {name: value for name, value in vars(module).items() if isfunction(value)}
    return {name: value for name, value in own.items() if marked(value) or value.__module__ == module.__name__}


def _from_python(path: str) -> Project:

    made = [value for value in vars(executed(path, path)).values() if isinstance(value, Pipeline)]
    if not made:
        raise BadSettings(f"{path}: it creates no Pipeline: orders = Pipeline.land('orders', folder=..., lake=...)")
    first = made[0].project
    pipelines: dict[str, Spec] = {}
    for each in made:
        if _places(each.project) != _places(first):
            raise BadSettings(f"{path}: all pipelines of a file must have the same folder and the same lake")
        for name, spec in each.project.pipelines.items():
            if pipelines.setdefault(name, spec) != spec:
                raise BadSettings(
                    f"{path}: there are two different pipelines named {name!r}: give one another name, "
                    "or keep only the whole chain in a variable"
                )
    home = posixpath.dirname(path)
    folder, lake = (from_home(home, each) for each in (first.folder, first.lake))
    checkpoints = None if first.checkpoints is None else posixpath.normpath(posixpath.join(home, first.checkpoints))
    project = Project(folder=folder, lake=lake, checkpoints=checkpoints, pipelines=pipelines, where=path)
    return check_project(project)


def _places(project: Project) -> tuple[str, str, str | None]:
    return project.folder, project.lake, project.checkpoints


_LAYERS = {"land": "land", "refine": "silver", "aggregate": "gold"}


class Pipeline:
    """A chain of pipelines, each reading the table of the one before. Its methods return a new chain."""

    def __init__(self, project: Project, last: str) -> None:
        self.project = project
        self._last = last

    @classmethod
    def of(
        cls,
        kind: str,
        name: str,
        *,
        folder: str | PathLike[str],
        lake: str | PathLike[str],
        checkpoints: str | PathLike[str] | None = None,
        **options: Any,
    ) -> Pipeline:
        """Begin a chain with a pipeline of any kind, with the same options as in YAML.

        Args:
            kind: The kind: `land`, `deadletters`, `replay` or another.
            name: The name of the pipeline, and of its table.
            folder: The data folder, or the address of a server.
            lake: The folder for tables, or its URL in a store.
            checkpoints: The folder for checkpoints and reports, if the lake is in a store.
            **options: The options of that kind.

        Returns:
            A chain of one pipeline.

        Raises:
            BadSettings: An option is unknown, missing or has a value that cannot be used.
        """
        spec = _checked_spec(name, kind, options)
        work = None if checkpoints is None else fspath(checkpoints)
        project = Project(folder=fspath(folder), lake=fspath(lake), checkpoints=work, pipelines={name: spec})
        return cls(check_project(project), name)

    @classmethod
    def land(
        cls,
        *topics: str,
        folder: str | PathLike[str],
        lake: str | PathLike[str],
        checkpoints: str | PathLike[str] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Pipeline:
        """Begin a chain with a pipeline that lands topics in a table, every message once.

            orders = Pipeline.land("orders", folder="shop", lake="lake")

        Args:
            *topics: The topics.
            folder: The data folder, or the address of a server.
            lake: The folder for tables, or its URL in a store.
            checkpoints: The folder for checkpoints and reports, if the lake is in a store.
            name: The name of the pipeline, and of its table; by default the first topic's, with `-land`.
            **options: Other options of the kind `land`.

        Returns:
            A chain of one pipeline.

        Raises:
            BadSettings: An option is unknown, missing or has a value that cannot be used.
        """
        said = name or f"{topics[0] if topics else 'topics'}-land"
        return cls.of("land", said, folder=folder, lake=lake, checkpoints=checkpoints, topics=list(topics), **options)

    def refine(self, schema: str = "infer", *, name: str | None = None, **options: Any) -> Pipeline:
        """Add typed, checked, deduplicated rows of the last table.

        Args:
            schema: The columns and their types, as Spark writes them; `infer` finds them out.
            name: The name of the pipeline; by default made from the last one's, as `orders-silver` from `orders-land`.
            **options: Other options of the kind `refine`, such as `key`.

        Returns:
            A new chain, longer by this pipeline.

        Raises:
            BadSettings: An option is unknown, missing or has a value that cannot be used.
            InvalidRequest: The chain has a pipeline of that name already.
        """
        return self.then("refine", name, schema=schema, **options)

    def aggregate(self, *, name: str | None = None, **options: Any) -> Pipeline:
        """Add measures of the last table by time window.

        Args:
            name: The name of the pipeline; by default made from the last one's, as `orders-gold` from `orders-silver`.
            **options: Other options of the kind `aggregate`, such as `time`, `by` and `measures`.

        Returns:
            A new chain, longer by this pipeline.

        Raises:
            BadSettings: An option is unknown, missing or has a value that cannot be used.
            InvalidRequest: The chain has a pipeline of that name already.
        """
        return self.then("aggregate", name, **options)

    def apply(self, function: Any) -> Pipeline:
        """Add a function with the decorator `pipeline`, which reads the table that it names.

        Args:
            function: The function.

        Returns:
            A new chain, longer by this pipeline.

        Raises:
            InvalidRequest: The function has no such decorator, or the chain has a pipeline of its name already.
            BadSettings: The chain has no pipeline that the function names as its source.
        """
        spec = marked(function)
        if spec is None:
            raise InvalidRequest("the function is not a pipeline: put @pipeline(source=...) above it")
        return self._with(self._new(spec))

    def then(self, kind: str, name: str | None = None, **options: Any) -> Pipeline:
        """Add a pipeline of any kind that reads the table of the last one.

            proof = orders.then("reconcile", "orders-proof", source="orders-land")

        Args:
            kind: The kind.
            name: The name of the pipeline; by default made from the last one's and the kind.
            **options: The options of that kind; `source` names another table.

        Returns:
            A new chain, longer by this pipeline.

        Raises:
            BadSettings: An option is unknown, missing or has a value that cannot be used.
            InvalidRequest: The chain has a pipeline of that name already.
        """
        said = name or f"{self._last.removesuffix('-land').removesuffix('-silver')}-{_LAYERS.get(kind, kind)}"
        return self._with(self._new(_checked_spec(said, kind, {"source": self._last, **options})))

    def expect(self, name: str, check: str, on_fail: OnFail = "warn") -> Pipeline:
        """Add an expectation to the last pipeline.

            orders.expect("positive", "amount > 0", on_fail="quarantine")

        Args:
            name: The name under which failing rows are counted.
            check: A condition in SQL that every row should meet.
            on_fail: What happens to rows that do not: `warn`, `drop`, `quarantine` or `fail`.

        Returns:
            A new chain, in which the last pipeline has this expectation too.

        Raises:
            BadSettings: The name or `on_fail` cannot be used.
        """
        spec = self.project.spec(self._last)
        known = [msgspec.structs.asdict(each) for each in spec.options.expect]
        given = {**_plain(spec.options), "expect": [*known, {"name": name, "check": check, "on_fail": on_fail}]}
        return self._with(_checked_spec(spec.name, spec.kind, given, spec))

    def run(
        self,
        *,
        spark: SparkSession | None = None,
        follow: bool = False,
        every_ms: int = 1_000,
        full_refresh: bool = False,
    ) -> list[Summary]:
        """Run the whole chain: one pipeline after the other or, with `follow`, side by side.

        Args:
            spark: The session; by default the running one, or a new one.
            follow: Go on with new messages until the process is interrupted.
            every_ms: With `follow`, the pause between two looks for new messages.
            full_refresh: Delete the tables and checkpoints first, and start over.

        Returns:
            A summary of each pipeline.

        Raises:
            PipelineFailed: A pipeline failed. Run it again: what was interrupted is finished first.
            ExpectationFailed: A row does not meet an expectation with `on_fail="fail"`.
            Busy: Another process runs the same pipeline.
            NotInstalled: Spark or Java is missing.
        """
        return run(
            self.project,
            *self.project.pipelines,
            spark=spark,
            follow=follow,
            every_ms=every_ms,
            full_refresh=full_refresh,
        )

    def plan(self, *, spark: SparkSession | None = None) -> list[Plan]:
        """What a run would read and write. Nothing is written.

        Args:
            spark: The session; by default the running one, or a new one.

        Returns:
            A plan of each pipeline.

        Raises:
            InvalidRequest: A source cannot be read.
            NotInstalled: Spark or Java is missing.
        """
        return Runner(self.project, spark=spark).plan(list(self.project.pipelines))

    def _new(self, spec: Spec) -> Spec:
        if spec.name in self.project.pipelines:
            raise InvalidRequest(f"two pipelines are named {spec.name}: rename one, name=...")
        return spec

    def _with(self, spec: Spec) -> Pipeline:
        pipelines = {**self.project.pipelines, spec.name: spec}
        return Pipeline(check_project(msgspec.structs.replace(self.project, pipelines=pipelines)), spec.name)


def run(
    project: Project | str | PathLike[str],
    *names: str,
    spark: SparkSession | None = None,
    follow: bool = False,
    every_ms: int = 1_000,
    full_refresh: bool = False,
) -> list[Summary]:
    """Run pipelines of a project.

        run("pipelines.yaml", "orders-land", "orders-silver")

    Args:
        project: The project, or the file that declares it.
        *names: The pipelines to run; by default all.
        spark: The session; by default the running one, or a new one.
        follow: Go on with new messages until the process is interrupted.
        every_ms: With `follow`, the pause between two looks for new messages.
        full_refresh: Delete the tables and checkpoints first, and start over.

    Returns:
        A summary of each pipeline.

    Raises:
        PipelineFailed: A pipeline failed. Run it again: what was interrupted is finished first.
        ExpectationFailed: A row does not meet an expectation with `on_fail="fail"`.
        Busy: Another process runs the same pipeline.
        NotInstalled: Spark or Java is missing.
        InvalidRequest: There is no such file, or no pipeline of that name.
        BadSettings: The file cannot be used; the error says where and why.
    """
    found = project if isinstance(project, Project) else read_project(project)
    wanted: Sequence[str] = names or list(found.pipelines)
    outcomes = Runner(found, spark=spark).run(wanted, follow=follow, every_ms=every_ms, full_refresh=full_refresh)
    raise_first(outcomes)
    return [outcome.summary for outcome in outcomes if outcome.summary is not None]


def _checked_spec(name: str, kind: str, options: dict[str, Any], former: Spec | None = None) -> Spec:
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    expect = [
        msgspec.structs.asdict(each) if isinstance(each, Expectation) else each for each in given.pop("expect", ())
    ]
    if expect:
        given["expect"] = expect
    function = None if former is None else former.function
    return Spec(name=name, kind=kind, options=read_options(kind_named(kind).options, given, name), function=function)


def _plain(options: Any) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(options).items() if key != "expect"}


# Running them: many named pipelines in one Spark application, one after the other or side by side. A JVM for each one
# would cost almost a gigabyte and ten seconds.


# Spark asks the source for news through Python, which is not worth doing more often.
LEAST_EVERY_MS = 100
_LOOK_S = 0.2
# Settings that tables depend on, whatever the user's session has. Days and times without a zone are UTC. Times have
# the type that lets readers skip parts of a file by time, which Spark's default does not. A file that was merged away
# before it was read must be an error, or its rows would be missing.
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
}


class Runner:
    """Runs pipelines of one project. `stop` may be called from any thread, and from a signal handler."""

    def __init__(
        self,
        project: Project,
        *,
        spark: SparkSession | None = None,
        world: World | None = None,
        tell: Callable[[Progress], None] = lambda progress: None,
        start: Callable[[], SparkSession] | None = None,
    ) -> None:
        """Without `spark`, `start` makes the session when one is needed; by default on all cores of this machine."""
        self._project = located(project)
        self._spark = spark
        self._start = start
        self._world = real_world() if world is None else world
        self._tell = tell
        self._starting = Lock()
        self._stopping = Event()
        self._asked = False

    def stop(self) -> None:
        """Stop all pipelines, each after its current batch."""
        self._asked = True
        self._stopping.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._asked

    def plan(self, names: Sequence[str]) -> list[Plan]:
        """What a run would read and write."""
        specs = self._project.in_order(names)
        return [kind_named(spec.kind).plan(self._context(spec)) for spec in specs]

    def run(
        self,
        names: Sequence[str],
        *,
        follow: bool = False,
        every_ms: int = 1_000,
        full_refresh: bool = False,
        from_quarantine: bool = False,
    ) -> list[Outcome]:
        """Run these pipelines, each after the one that it reads from; with `follow`, all of them until `stop`.

        With `from_quarantine` they try the rows of their quarantines once more, and read nothing else.
        """
        specs = self._project.in_order(names)
        if from_quarantine:
            _check_quarantines(specs, alone=not follow and not full_refresh)
        if follow:
            _check_follow(specs, every_ms)
        check_reachable(tables_at(self._project.lake))
        with ExitStack() as locks:
            for spec in specs:
                locks.enter_context(held(self._world, self._project, spec))
            for spec in specs:
                end_run(self._world, self._project.checkpoint(spec.name))  # a query that outlived its driver
                if full_refresh or is_half_forgotten(self._world, self._project, spec):
                    forget(self._world, self._project, spec)
                check_fit(self._world, self._project, spec)
            locks.enter_context(_settings_of(self._session()))
            if follow:
                return self._side_by_side([self._context(spec, follow=True, every_ms=every_ms) for spec in specs])
            return self._one_by_one(specs, from_quarantine=from_quarantine)

    def _one_by_one(self, specs: Sequence[Spec], *, from_quarantine: bool) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        for spec in specs:
            failed = [name for name in spec.options.reads if name in outcomes and outcomes[name].error is not None]
            if failed:
                error = InvalidRequest(f"{spec.name} was not run: {failed[0]}, its source, failed")
                outcomes[spec.name] = Outcome(pipeline=spec.name, error=error)
            elif not self._stopping.is_set():
                outcomes[spec.name] = _outcome(self._context(spec, from_quarantine=from_quarantine))
        return list(outcomes.values())

    def _side_by_side(self, contexts: Sequence[Context]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}

        def run(context: Context) -> None:
            outcomes[context.name] = _outcome(context)
            if outcomes[context.name].error is not None:
                self._stopping.set()  # the others must not go on without it

        threads = [Thread(target=run, args=(context,), name=f"pipeline {context.name}") for context in contexts]
        try:
            for thread in threads:
                thread.start()
            _wait_for(threads)
        finally:  # not even an interrupt may release the locks while something is written
            self._stopping.set()
            _wait_for(threads)
        return [outcomes[context.name] for context in contexts]

    def _context(self, spec: Spec, **how: Any) -> Context:
        return Context(
            world=self._world,
            session=self._session,
            project=self._project,
            spec=spec,
            stopping=self._stopping,
            tell=self._tell,
            run=f"{self._world.ids.random_u32():08x}",
            **how,
        )

    def _session(self) -> SparkSession:
        with self._starting:
            keep_pyspark_quiet()
            if self._spark is None:
                from holdfast.spark.session import session

                with _signals_kept():
                    self._spark = session("holdfast pipelines") if self._start is None else self._start()
            return self._spark


def _wait_for(threads: Sequence[Thread]) -> None:
    for thread in threads:
        while thread.is_alive():  # a join without a timeout would block signals
            thread.join(_LOOK_S)


@contextmanager
def _settings_of(spark: SparkSession) -> Iterator[None]:
    """Use our settings for the block, then restore those of the session."""
    former = {name: spark.conf.get(name, None) for name in _SETTINGS}
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, before in former.items():
            if before is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handler of Ctrl-C after the block: a new session replaces it."""
    if current_thread() is not main_thread():
        yield
        return
    former = getsignal(SIGINT)
    try:
        yield
    finally:
        signal(SIGINT, former)


def _outcome(context: Context) -> Outcome:
    clock = context.world.clock
    began_ns = clock.monotonic_ns()
    try:
        summary = kind_named(context.spec.kind).run(context)
        seconds = (clock.monotonic_ns() - began_ns) / 1e9
        outcome = Outcome(pipeline=context.name, summary=msgspec.structs.replace(summary, seconds=seconds))
    except Exception as error:
        outcome = Outcome(pipeline=context.name, error=in_words(error, context.name))
    note_run(context.world, context.project, _last_part(context, outcome, (clock.monotonic_ns() - began_ns) / 1e9))
    return outcome


def _last_part(context: Context, outcome: Outcome, seconds: float) -> Outcome:
    """What of a run is still to be noted: all of it, if it was not noted in parts."""
    if not context.noted or outcome.summary is None:
        return outcome
    seconds -= sum(part.seconds for part in context.noted)
    rest = msgspec.structs.replace(without(outcome.summary, context.noted), seconds=seconds)
    return msgspec.structs.replace(outcome, summary=rest)


def _check_quarantines(specs: Sequence[Spec], *, alone: bool) -> None:
    if not alone:
        raise InvalidRequest("the rows of a quarantine are retried only once: leave out --follow and --full-refresh")
    for spec in specs:
        if spec.kind != "refine" or spec.options.format != "delta":
            raise InvalidRequest(
                f"{spec.name}: only a pipeline of the kind refine with a Delta table can retry its quarantine"
            )


def _check_follow(specs: Sequence[Spec], every_ms: int) -> None:
    if every_ms < LEAST_EVERY_MS:
        raise InvalidRequest(
            f"a pipeline cannot look for new data every {every_ms} ms: give {LEAST_EVERY_MS} ms or more"
        )
    for spec in specs:
        if not kind_named(spec.kind).follows:
            raise InvalidRequest(f"{spec.name} is of the kind {spec.kind}, which has an end: run it without --follow")


def raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise the first error, if there is one."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
