"""What `holdfast serve` says of where it listens, and of what it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.cli.serve import _served, announcement
from holdfast.config.settings_file import read_settings
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.settings import ServerSettings
from tests.unit.commands import runner

DEFAULT = ServerSettings()


def test_a_server_on_this_machine_says_its_address():
    assert announcement("data", ["http://127.0.0.1:7700"], DEFAULT) == [
        "Holdfast serves data at http://127.0.0.1:7700",
        "Console: http://127.0.0.1:7700/ui  API: http://127.0.0.1:7700/docs",
    ]


def test_a_server_on_all_addresses_says_so_and_one_that_can_be_opened():
    assert announcement("data", ["https://0.0.0.0:8080", "unix:/run/holdfast"], DEFAULT) == [
        "Holdfast serves data at https://127.0.0.1:8080, unix:/run/holdfast",
        "It listens on all IPv4 addresses of this machine, port 8080",
        "Console: https://127.0.0.1:8080/ui  API: https://127.0.0.1:8080/docs",
    ]
    without_console = ServerSettings(console=False)
    assert announcement("data", ["http://[::]:8080"], without_console) == [
        "Holdfast serves data at http://[::1]:8080",
        "It listens on all IPv6 addresses of this machine, port 8080",
    ]


@pytest.mark.parametrize("package", ["jinja2", "prometheus_client", "python_multipart"])
def test_a_server_without_what_its_pages_need_does_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
):
    monkeypatch.setitem(sys.modules, package, None)
    done = runner(capsys, monkeypatch)("serve", tmp_path / "data", "--port", 0)
    assert done.code == 2
    assert f"({package}); run: pip install 'holdfast[server]'" in done.err
    assert not (tmp_path / "data").exists()


def test_the_place_to_serve_is_given_once():
    assert _served(None, "s3://bucket/jobs") == "s3://bucket/jobs"
    assert _served("s3://bucket/jobs/", "s3://bucket/jobs") == "s3://bucket/jobs"
    assert _served("./data", None) == "./data"
    with pytest.raises(InvalidRequest, match=r"two places to serve, \./data and --store postgresql://host/db/jobs"):
        _served("./data", "postgresql://u:sesame@host/db/jobs")
    with pytest.raises(InvalidRequest, match=r"--store \./data is not a store"):
        _served(None, "./data")


def test_the_environment_can_name_a_store_to_serve():
    assert read_settings(real_world(), {"HOLDFAST_BROKER_DATA_DIR": "s3://bucket/jobs"}).data_dir == "s3://bucket/jobs"
