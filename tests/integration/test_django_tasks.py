"""Django's tasks on Holdfast: the backend in a project, its checks, signals, results, commits and the admin's page."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.frameworks_gear import Site, until
from tests.integration.process_gear import server_process
from tests.tidy import markdown
from tests.tidy.repo import ROOT

pytest.importorskip("holdfast.integrations.django.framework", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = """
import os

SECRET_KEY = "for tests only"
USE_TZ = True
DEBUG = True
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "urls"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "holdfast.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
}
TASKS = {
    "default": {
        "BACKEND": "holdfast.django.HoldfastBackend",
        "QUEUES": ["default", "mail@shop"],
        "OPTIONS": {"url": os.environ["PLACE"], "attempts": int(os.environ.get("ATTEMPTS", "1"))},
    },
    "committed": {
        "BACKEND": "holdfast.django.HoldfastBackend",
        "OPTIONS": {"url": os.environ["PLACE"], "prefix": "committed.", "enqueue_on_commit": True},
    },
    "forgetful": {
        "BACKEND": "holdfast.django.HoldfastBackend",
        "OPTIONS": {"url": os.environ["PLACE"], "prefix": "forgetful.", "keep_results": 0, "durability": "os"},
    },
}
"""
URLS = """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""
TASKS = """
import os

import holdfast
from holdfast.integrations.django.framework import task_enqueued, task_finished, task_started
from notes_kept import note, sleep_until

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@task
def add(x, y):
    return x + y


@task(takes_context=True)
async def attempt(context, unit):
    return {unit: context.attempt, "id": context.task_result.id}


@task(takes_context=True)
def gated(context, name):
    note("began", name, context.attempt)
    sleep_until(name)
    note("ended", name)
    return name


@task
def count(number):
    note("ran", number)


@task
def fail():
    note("failed")
    raise ValueError("the printer is on fire")


@task
def large():
    return "x" * 2_000_000


@task(takes_context=True)
def once_more(context):
    if context.attempt == 1:
        raise holdfast.Retry("not yet", delay=0)
    return context.attempt


def told(name):
    def receiver(sender, task_result, **kwargs):
        note(name, task_result.task.name, task_result.status.name)

    return receiver


if os.environ.get("TELL"):
    on_enqueue, on_start, on_finish = told("enqueued"), told("started"), told("finished")
    task_enqueued.connect(on_enqueue)
    task_started.connect(on_start)
    task_finished.connect(on_finish)
"""
PROGRAM = """
import os
import time
from datetime import timedelta

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
import django

django.setup()

from django.core.management import call_command
from django.db import transaction
from django.utils import timezone
from holdfast.integrations.django.framework import *
from tasks import *


def wait(result):
    while not result.is_finished:
        time.sleep(0.02)
        result.refresh()
    return result


def send_gated(name, delay=None):
    (gated.using(run_after=timezone.now() + timedelta(seconds=delay)) if delay else gated).enqueue(name)


def send_count(number):
    count.enqueue(number)
"""
FILES = {"settings.py": SETTINGS, "urls.py": URLS, "tasks.py": TASKS, "program.py": PROGRAM}
MANAGE = [
    "-c",
    "import program, sys; from django.core.management import execute_from_command_line as run; run(sys.argv)",
]
WORKER = [*MANAGE, "holdfast_worker"]


@pytest.fixture(params=["folder", "server"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "folder":
        yield Site(tmp_path, f"holdfast://{tmp_path}/data", f"{tmp_path}/data", FILES, WORKER)
        return
    with server_process(tmp_path / "data", "--no-console") as server:
        yield Site(tmp_path, f"holdfast+{server.url}", server.url, FILES, WORKER)


@pytest.fixture
def alone(tmp_path: Path) -> Site:
    return Site(tmp_path, f"{tmp_path}/data", f"{tmp_path}/data", FILES, WORKER)


def test_results_signals_priorities_failures_and_dead_letters(site: Site):
    with site.worker("--concurrency", "2", TELL="1"):
        printed = site.run(
            "import asyncio\n"
            "print(wait(add.enqueue(2, y=3)).return_value)\n"
            "print(wait(asyncio.run(attempt.aenqueue('meter'))).return_value['meter'])\n"
            "failed = wait(fail.enqueue())\n"
            "print(failed.status.name, failed.errors[0].exception_class.__name__, failed.attempts)\n"
            "print('on fire' in failed.errors[0].traceback, failed.errors[0].exception_class is ValueError)\n"
            "print(wait(once_more.enqueue()).return_value)\n"
            "print(wait(large.enqueue()).errors[0].exception_class.__name__)\n"
            "again = add.get_result(add.enqueue(1, 1).id)\n"
            "print(again.args, again.kwargs, again.task == add, again.enqueued_at <= timezone.now())\n"
            "print(wait(add.using(queue_name='mail@shop', priority=-7).enqueue(1, 1)).task.priority)\n"
        ).splitlines()
    assert printed == [
        "5", "1", "FAILED ValueError 1", "True True", "2", "MessageTooLarge", "[1, 1] {} True True", "-7",
    ]  # fmt: skip
    with site.broker() as broker, broker.queue("default") as queue:
        letters = {letter.headers["task"]: letter for letter in queue.dead.list()}
        assert set(letters) == {"tasks.fail", "tasks.large"}
        assert "the printer is on fire" in letters["tasks.fail"].error
        assert "mail_x40shop" in broker.topics()
    told = site.notes()
    assert told.count(["started", "fail", "RUNNING"]) == 1
    assert told.count(["finished", "fail", "FAILED"]) == 1
    assert told.count(["finished", "once_more", "SUCCESSFUL"]) == 1
    site.run("count.enqueue(1)", TELL="1")
    assert site.notes()[-1] == ["enqueued", "count", "READY"]


def test_the_urgent_task_runs_first(alone: Site):
    alone.run("for number in (-100, -1, 0, 1, 100): count.using(priority=number).enqueue(number)")
    with alone.worker("--queue", "default", "--concurrency", "1"):
        until(lambda: len(alone.notes()) == 5, "all have run")
    assert [note[1] for note in alone.notes()] == ["100", "1", "0", "-1", "-100"]


def test_a_task_that_raises_runs_as_often_as_the_backend_says_and_again_after_a_redrive(alone: Site):
    with alone.broker() as broker:
        broker.create_topic("default", backoff_ms=10, max_attempts=4)
        alone.run("fail.enqueue()", ATTEMPTS="3")
        with alone.worker(ATTEMPTS="3"), broker.queue("default") as queue:
            until(queue.dead.list, "it is a dead letter")
            assert alone.notes() == [["failed"]] * 3
            queue.dead.redrive()
            until(lambda: len(alone.notes()) == 6, "it runs again")


def test_a_task_that_has_succeeded_is_not_run_again(alone: Site):
    with alone.broker() as broker:
        result_id = alone.run("result = count.enqueue(1); print(result.id)")
        with alone.worker():
            until(
                lambda: alone.run(f"print(count.get_result('{result_id}').status.name)") == "SUCCESSFUL", "it has run"
            )
            with broker.queue("default") as queue:
                until(lambda: queue.stats().floor == 1, "it is acked")
                queue.seek("start")  # as if it had never been acked
                until(lambda: queue.stats().floor == 1, "it is acked again")
    assert alone.notes() == [["ran", "1"]]


def test_a_task_that_this_program_does_not_have_is_a_dead_letter(alone: Site):
    result_id = alone.run("print(add.enqueue(1, 2).id)")
    with alone.broker() as broker, broker.queue("default") as queue:
        (alone.folder / "tasks.py").write_text(TASKS.replace("def add(", "def subtract("))
        with alone.worker():
            letter = until(queue.dead.list, "it is a dead letter")[0]
        assert "there is no task tasks.add" in letter.error
        assert broker.documents.get(f"django.result.{result_id}").value["status"] == "FAILED"


def test_a_message_that_is_no_task_is_a_dead_letter_at_once(alone: Site):
    with alone.broker() as broker:
        broker.create_topic("default", max_attempts=21)
        with broker.queue("default") as queue:
            for body in (b"not json", b"[]", b'{"id": "1"}', b'{"id": "1", "task": "tasks.add"}'):
                queue.put(body)
            with alone.worker():
                letters = until(lambda: len(found := queue.dead.list()) == 4 and found, "all are dead letters")
            assert ["malformed" in letters[0].error, "got `array`" in letters[1].error] == [True, True]
            assert all("a task has a field status" in letter.error for letter in letters[2:])


def test_a_task_that_is_enqueued_on_commit_is_not_there_before(alone: Site):
    printed = alone.run(
        "call_command('migrate', verbosity=0)\n"
        "later = add.using(backend='committed')\n"
        "with transaction.atomic():\n"
        "    result = later.enqueue(1, 2)\n"
        "    print(result.enqueued_at)\n"
        "    try:\n"
        "        result.refresh()\n"
        "    except TaskResultDoesNotExist:\n"
        "        print('not there')\n"
        "result.refresh()\n"
        "print(result.status.name, result.enqueued_at is not None)\n"
        "try:\n"
        "    with transaction.atomic():\n"
        "        lost = later.enqueue(1, 2)\n"
        "        raise ValueError\n"
        "except ValueError:\n"
        "    pass\n"
        "print(later.get_backend().queue('default').qsize())\n"
    )
    assert printed.splitlines() == ["None", "not there", "READY True", "1"]


def test_without_results_nothing_is_stored_but_the_message(alone: Site):
    with alone.worker("--backend", "forgetful"), alone.broker() as broker:
        printed = alone.run(
            "result = attempt.using(backend='forgetful').enqueue('metre')\n"
            "print(result.task.get_backend().supports_get_result)\n"
            "try:\n"
            "    result.refresh()\n"
            "except NotImplementedError as error:\n"
            "    print(error)\n"
        ).splitlines()
        assert printed[0] == "False"
        assert "keep_results is 0" in printed[1]
        with broker.queue("forgetful.default") as queue:
            until(lambda: queue.stats().floor == 1, "it has run")
        assert broker.documents.list() == []


def test_expired_results_are_gone_and_removed(alone: Site):
    printed = alone.run(
        "import msgspec\n"
        "backend = task_backends['default']\n"
        "backend._settings = msgspec.structs.replace(backend.settings, keep_results=0.05)\n"
        "result = add.enqueue(1, 2)\n"
        "while True:\n"
        "    try:\n"
        "        result.refresh()\n"
        "    except TaskResultDoesNotExist:\n"
        "        break\n"
        "print(backend.results.remove_expired(), backend.shared.broker.documents.list())\n"
    )
    assert printed == "1 []"


def test_the_checks_say_what_is_wrong(alone: Site):
    printed = alone.run(
        "from holdfast.django import HoldfastBackend\n"
        "def say(queues=('default',), **options):\n"
        "    backend = HoldfastBackend('x', {'QUEUES': list(queues), 'OPTIONS': options})\n"
        "    print(*(message.id for message in backend.check()))\n"
        "say()\n"
        "say(url='data', speed=9)\n"
        "say(url='data', enqueue_on_commit='elsewhere')\n"
        "say(url='data', attempts=0)\n"
        "say(url='data', queue_settings={'max_attempt': 3})\n"
        "say(url='data')\n"
        "from django.test import override_settings\n"
        "from holdfast.integrations.django.apps import check_backends\n"
        "with override_settings(TASKS={}):\n"
        "    print(*(message.id for message in check_backends()))\n"
        "call_command('check')\n"
        "call_command('makemigrations', '--check')\n"
    ).splitlines()
    assert printed[:5] == [f"holdfast.E00{number}" for number in (1, 1, 2, 3, 4)]
    assert printed[5] == ""
    assert printed[6] == "holdfast.W001"
    assert "no issues" in printed[7]


def test_the_admin_lists_the_queues_with_links_to_the_console(site: Site):
    printed = site.run(
        "call_command('migrate', verbosity=0)\n"
        "from django.contrib.auth.models import Permission, User\n"
        "from django.test import Client\n"
        "root = User.objects.create_superuser('root', password='x')\n"
        "clerk = User.objects.create_user('clerk', password='x', is_staff=True)\n"
        "client = Client()\n"
        "client.force_login(clerk)\n"
        "print(client.get('/admin/holdfast/taskqueue/').status_code)\n"
        "clerk.user_permissions.add(Permission.objects.get(codename='view_taskqueue'))\n"
        "add.enqueue(1, 2)\n"
        "page = client.get('/admin/holdfast/taskqueue/')\n"
        "print(page.status_code)\n"
        "print(page.content.decode())\n"
        "client.force_login(root)\n"
        "print(client.get('/admin/').status_code, client.get('/admin/holdfast/taskqueue/add/').status_code)\n"
    )
    assert printed.startswith("403\n200\n")
    assert printed.endswith("200 403")
    assert "<td>1</td><td>0</td><td>0</td>" in printed
    if site.place.startswith("holdfast+"):
        assert f'href="{site.url}/ui/queues/mail_x40shop"' in printed
    else:
        assert f"holdfast ui {site.url} --open" in printed


def test_the_command_says_what_it_cannot_use(alone: Site):
    for arguments, said in (
        (["--queue", "nowhere"], "there is no queue 'nowhere' in QUEUES"),
        (["--concurrency", "0.5"], "invalid int value"),
        (["--backend", "nowhere"], "there is no 'nowhere' in TASKS: --backend takes one of committed, default, forg"),
        (["--lease", "-1"], "lease=-1.0 cannot be used"),
        (["--health", "70000"], "health_port=70000 cannot be used"),
        (["--concurrency", "0"], "--concurrency 0 cannot be used"),
    ):
        process = alone.start(*arguments)
        assert process.wait(60) != 0
        assert said in alone.log()
    assert "Traceback" not in alone.log()


def test_the_project_of_the_guide(tmp_path: Path):
    page = (ROOT / "docs" / "how-to" / "use-django-tasks.md").read_text("utf-8")
    files = {
        named[1]: block.code for block in markdown.blocks(page) if (named := re.match(r"# (\w+\.py)\n", block.code))
    }
    if importlib.util.find_spec("django.tasks") is None:
        files["tasks.py"] = files["tasks.py"].replace("django.tasks", "django_tasks")
    site = Site(tmp_path, "jobs", f"{tmp_path}/jobs", files | {"program.py": PROGRAM}, WORKER)
    with site.worker("--concurrency", "8"):
        assert site.run("print(wait(resize.enqueue('cat.png')).return_value)") == "cat.png-small"
    assert "Working on default at jobs." in site.log()
