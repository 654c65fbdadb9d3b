"""Celery without Redis: broker and results are in a folder. A rejected task becomes a dead letter."""

import os
import subprocess
import sys
import tempfile

from celery import Celery, chord
from celery.exceptions import Reject

import holdfast

FOLDER = os.environ.get("JOBS", "jobs")
app = Celery("tasks_with_celery", broker=f"holdfast://{FOLDER}", backend=f"holdfast://{FOLDER}")
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1)


@app.task
def resize(image: str) -> str:
    return f"{image}-small"


@app.task
def album(images: list[str]) -> str:
    return " ".join(images)


@app.task
def pay(order: int) -> None:
    raise Reject(f"there is no order {order}", requeue=False)


def send() -> None:
    """What a web application would do."""
    print(resize.delay("cat.png").get(timeout=60, interval=0.05))
    print(chord(resize.s(f"{name}.png") for name in ("dog", "owl"))(album.s()).get(timeout=60, interval=0.05))
    pay.delay(7)
    resize.apply_async(("fox.png",), countdown=3600)  # stored, and not in a worker's memory
    resize.delay("cow.png").get(timeout=60, interval=0.05)  # the worker takes one task at a time: the others have run


def main(folder: str) -> None:
    environment = os.environ | {"JOBS": folder, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-m", "celery", "-A", "tasks_with_celery", "worker", "-P", "solo", "-l", "CRITICAL"]
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        subprocess.run([sys.executable, __file__, "send"], env=environment, check=True)
    finally:
        worker.terminate()
        worker.wait()
    with holdfast.open_broker(folder) as broker, broker.queue("celery") as queue:
        print(f"delayed: {queue.stats().delayed}, dead: {[letter.headers['task'] for letter in queue.dead.list()]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["send"]:
        send()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
