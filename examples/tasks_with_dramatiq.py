"""Dramatiq without Redis: broker and results are in a folder. A message out of retries becomes a dead letter."""

import os
import subprocess
import sys
import tempfile

import dramatiq
from dramatiq.results import Results

import holdfast
from holdfast.integrations.dramatiq import HoldfastBroker, HoldfastResults

FOLDER = os.environ.get("JOBS", "jobs")
broker = HoldfastBroker(FOLDER)
broker.add_middleware(Results(backend=HoldfastResults(FOLDER)))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def resize(image: str) -> str:
    return f"{image}-small"


@dramatiq.actor(queue_name="payments", max_retries=2, min_backoff=10)
def pay(order: int) -> None:
    raise ConnectionError(f"the bank did not answer for order {order}")


def send() -> None:
    """What a web application would do."""
    print(resize.send("cat.png").get_result(block=True, timeout=60_000))
    print((resize.message("dog.png") | resize.message()).run().get_result(block=True, timeout=60_000))
    resize.send_with_options(args=("fox.png",), delay=3_600_000)  # stored, and not in a worker's memory
    pay.send(7)
    broker.join(pay.queue_name, timeout=60_000)


def main(folder: str) -> None:
    environment = os.environ | {"JOBS": folder, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-m", "dramatiq", "tasks_with_dramatiq", "--processes", "1", "--threads", "2"]
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        subprocess.run([sys.executable, __file__, "send"], env=environment, check=True)
    finally:
        worker.terminate()
        worker.wait()
    with holdfast.open_broker(folder) as jobs, jobs.queue("default") as default, jobs.queue("payments") as payments:
        print(f"delayed: {default.stats().delayed}, dead: {[letter.error for letter in payments.dead.list()]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["send"]:
        send()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
