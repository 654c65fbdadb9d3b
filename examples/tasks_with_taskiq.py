"""Taskiq without Redis: broker and results are in a folder. Labels say when and how urgently a task runs."""

import asyncio
import os
import subprocess
import sys
import tempfile

import holdfast
from holdfast.integrations.taskiq import HoldfastBroker, HoldfastResultBackend

FOLDER = os.environ.get("JOBS", "jobs")
broker = HoldfastBroker(FOLDER).with_result_backend(HoldfastResultBackend(FOLDER))


@broker.task(task_name="resize")
async def resize(image: str) -> str:
    return f"{image}-small"


@broker.task(task_name="pay", ack_type="when_saved")
async def pay(order: int) -> None:
    raise ConnectionError(f"the bank did not answer for order {order}")


async def send() -> None:
    """What a web application would do."""
    await broker.startup()
    print((await (await resize.kiq("cat.png")).wait_result(timeout=60)).return_value)
    print(repr((await (await pay.kiq(7)).wait_result(timeout=60)).error))
    await resize.kicker().with_labels(delay=3600).kiq("fox.png")  # stored, and not in a worker's memory
    await resize.kicker().with_labels(queue_name="mail", priority=9).kiq("owl.png")  # for workers of another queue
    await broker.shutdown()


def main(folder: str) -> None:
    environment = os.environ | {"JOBS": folder, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-m", "taskiq", "worker", "tasks_with_taskiq:broker", "--workers", "1"]
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        subprocess.run([sys.executable, __file__, "send"], env=environment, check=True)
    finally:
        worker.terminate()
        worker.wait()
    with holdfast.open_broker(folder) as jobs, jobs.queue("taskiq") as queue, jobs.queue("mail") as mail:
        print(f"delayed: {queue.stats().delayed}, mail: {[message.priority for message in mail.peek(5)]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["send"]:
        asyncio.run(send())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
