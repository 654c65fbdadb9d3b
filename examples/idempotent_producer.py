"""A loader is killed with -9 in the middle. It begins its file anew, and every line is stored once.

python examples/idempotent_producer.py
"""

import subprocess
import sys
import tempfile
import time

import holdfast

LINES = 5_000


def load(folder: str, *, say: bool) -> int:
    """Send the whole file, whatever was stored of it before; answers how many lines were there already."""
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("lines", partitions=3, exist_ok=True)
        # The name fences an earlier loader that may still be alive; resume gives the same messages the same numbers.
        with broker.producer(name="loader", resume=True, batch_messages=50) as producer:
            sent = []
            for number in range(LINES):
                sent.append(producer.send("lines", b"line %d" % number, key=f"{number % 100}"))
                if say and number == 2_000:
                    print(sent[-1].result().id, "is on disk", flush=True)
                if say and number > 2_000:
                    time.sleep(0.001)  # time for the kill
        return sum(one.result().duplicate for one in sent)


def kill_a_loader(folder: str) -> None:
    loader = subprocess.Popen([sys.executable, __file__, "--load", folder], stdout=subprocess.PIPE, text=True)
    print(loader.stdout.readline().strip())
    loader.kill()  # it is at work on the next ones
    loader.wait()
    loader.stdout.close()


def main(folder: str) -> None:
    kill_a_loader(folder)
    with holdfast.open_broker(folder) as broker:
        there = broker.describe_topic("lines").messages
    print(f"killed; some lines were stored, but not all: {0 < there < LINES}")
    known = load(folder, say=False)
    with holdfast.open_broker(folder) as broker, broker.consumer("lines", group="check") as consumer:
        lines = [message.body for _ in range(3) for message in consumer.poll(timeout=1, max_records=LINES)]
    print(f"loaded again, all of these were known: {known == there}")
    print(f"stored: {len(lines)}, each once: {set(lines) == {b'line %d' % n for n in range(LINES)}}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        load(sys.argv[2], say=True)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(f"{temporary}/import")
