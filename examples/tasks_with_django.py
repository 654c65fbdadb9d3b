"""Django's tasks without Redis: a project in one file, with its worker. A task that raises becomes a dead letter."""

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.utils import timezone

import holdfast

FOLDER = os.environ.get("JOBS", "jobs")
BACKEND = {"BACKEND": "holdfast.django.HoldfastBackend", "OPTIONS": {"url": FOLDER}}
if not settings.configured:
    settings.configure(USE_TZ=True, INSTALLED_APPS=["holdfast.django"], TASKS={"default": BACKEND})
    django.setup()
if django.VERSION >= (6,):
    from django.tasks import task
else:
    from django_tasks import task


@task
def resize(image):
    return f"{image}-small"


@task
def pay(order):
    raise ConnectionError(f"the bank did not answer for order {order}")


def finished(result):
    while not result.is_finished:
        time.sleep(0.05)
        result.refresh()
    return result


def send() -> None:
    """What a web application would do."""
    from tasks_with_django import pay, resize  # under the name that the worker imports

    print(finished(resize.enqueue("cat.png")).return_value)
    print(finished(pay.enqueue(7)).errors[0].exception_class.__name__)
    resize.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("fox.png")


def main(folder: str) -> None:
    environment = os.environ | {"JOBS": folder, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, __file__, "holdfast_worker"]
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        subprocess.run([sys.executable, __file__, "send"], env=environment, check=True)
    finally:
        worker.terminate()
        worker.wait()
    with holdfast.open_broker(folder) as broker, broker.queue("default") as queue:
        print(f"delayed: {queue.stats().delayed}, dead: {[letter.headers['task'] for letter in queue.dead.list()]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["send"]:
        send()
    elif sys.argv[1:]:
        execute_from_command_line(sys.argv)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
