"""The sum of what a server may open: what fits, what is lowered, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.env.process import descriptor_limit, open_descriptors
from holdfast.errors import BadSettings
from holdfast.server.limits import (
    LEAST_CONNECTIONS,
    OWN,
    REFUSED,
    RESERVE,
    Budget,
    budget,
    needed,
    owner_connections,
    read_segments,
)
from holdfast.settings import BrokerSettings, ServerSettings
from holdfast.storage.segment import DESCRIPTORS_EACH

CONNECTIONS = ServerSettings().max_connections
FILES = BrokerSettings().open_files


def usual(descriptors: int, **more: bool | int) -> Budget:
    return budget(descriptors, **{"connections": CONNECTIONS, "open_files": FILES} | more)


def sum_of(found: Budget) -> int:
    apart = OWN + RESERVE + REFUSED + owner_connections(found.descriptors)
    apart += read_segments(found.descriptors) * DESCRIPTORS_EACH
    return apart + found.connections + found.open_files


def test_what_fits_is_left_as_it_is():
    assert usual(65_536) == Budget(65_536, CONNECTIONS, FILES)
    assert usual(needed(CONNECTIONS, FILES)) == Budget(needed(CONNECTIONS, FILES), CONNECTIONS, FILES)


def test_connections_that_nobody_has_set_are_lowered_until_they_fit():
    found = usual(8_192)
    assert found.open_files == FILES
    assert LEAST_CONNECTIONS < found.connections < CONNECTIONS
    assert sum_of(found) == 8_192


def test_a_small_limit_is_shared_by_connections_and_logs():
    found = usual(1_024)
    assert found.connections >= 300
    assert found.open_files >= 300
    assert sum_of(found) <= 1_024


def test_connections_that_were_set_are_kept_or_refused_and_never_lowered():
    assert usual(4_096, connections=2_000, connections_set=True).connections == 2_000
    with pytest.raises(BadSettings, match=r"1,024 files open.*2,000 connections.*LimitNOFILE"):
        usual(1_024, connections=2_000, connections_set=True)


def test_files_of_logs_that_were_set_are_kept_or_refused_and_never_lowered():
    assert usual(4_096, open_files=800, open_files_set=True).open_files == 800
    with pytest.raises(BadSettings, match=r"800 files of logs need .*open_files in \[broker\]"):
        usual(1_024, open_files=800, open_files_set=True)


def test_a_limit_that_leaves_nothing_sensible_is_refused_with_what_to_set():
    with pytest.raises(BadSettings, match=r"64 connections and 100 files of logs need \d+") as caught:
        usual(256)
    least = int(str(caught.value).partition("need ")[2].partition(".")[0])
    assert usual(least).connections >= LEAST_CONNECTIONS


@given(
    descriptors=st.integers(0, 200_000),
    connections=st.integers(1, 100_000),
    open_files=st.integers(1, 10_000),
    connections_set=st.booleans(),
    open_files_set=st.booleans(),
)
def test_whatever_is_allowed_fits_and_is_no_more_than_was_asked_for(
    descriptors, connections, open_files, connections_set, open_files_set
):
    try:
        found = budget(
            descriptors,
            connections=connections,
            open_files=open_files,
            connections_set=connections_set,
            open_files_set=open_files_set,
        )
    except BadSettings:
        return
    assert sum_of(found) <= descriptors
    assert 1 <= found.connections <= connections
    assert 1 <= found.open_files <= open_files
    assert found.connections == connections or not connections_set
    assert found.open_files == open_files or not open_files_set


@given(connections=st.integers(64, 100_000), open_files=st.integers(100, 10_000))
def test_what_is_said_to_be_needed_is_enough_and_one_less_is_not(connections, open_files):
    least = needed(connections, open_files)
    wanted = {"connections": connections, "open_files": open_files}
    assert budget(least, **wanted, connections_set=True, open_files_set=True).connections == connections
    with pytest.raises(BadSettings):
        budget(least - 1, **wanted, connections_set=True, open_files_set=True)


def test_this_process_counts_what_it_has_open(tmp_path):
    before = open_descriptors()
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        assert open_descriptors() == before + 2
    assert open_descriptors() < descriptor_limit()


def test_the_reference_tells_the_numbers_of_the_code():
    few = usual(1_024)
    page = (Path(__file__).parents[2] / "docs/reference/limits.md").read_text()
    assert f"The defaults need {needed(CONNECTIONS, FILES):,}; with 1,024 there is room for " in page
    assert f"{few.connections} connections and {few.open_files} files of logs." in page
