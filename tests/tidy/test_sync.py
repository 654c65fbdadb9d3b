"""The modules for threads are those that tools/sync.py makes of the modules for tasks."""

from __future__ import annotations

import importlib.util

import pytest

from tests.tidy.repo import assert_none, name_of
from tools.sync import changes


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff, which formats them")
def test_no_generated_module_is_stale():
    assert_none([name_of(path) for path in changes()], 'Run "make sync", and look at what it changed.')
