"""Put, get, ack; what is not acked comes back; all of it is there after a restart.

python examples/queue_basics.py
"""

import tempfile

import holdfast


def main(folder: str) -> None:
    with holdfast.open(folder) as queue:  # makes the folder; this process owns it until the end of the block
        stored = queue.put(b"resize 1", key="user-7", headers={"kind": "image"})
        print(f"{stored.id} is on disk ({stored.durability})")
        queue.put_many([b"resize 2", b"resize 3"])  # all of them, or none

        with queue.get(timeout=5) as message:  # acked at the end of the block, nacked if it raises
            print(f"{message.body!r} of {message.key}, attempt {message.attempt}")

        taken = queue.get()  # in hand, and never acked: as if this process had been killed
        print(f"{taken.body!r} is taken, {queue.stats().ready} ready, {queue.stats().leased} leased")

    with holdfast.open(folder, create=False) as queue:
        messages = queue.get_many(10, timeout=0)
        print("after a restart:", [(message.body, message.attempt) for message in messages])
        queue.ack_many(messages)
        try:
            queue.get(timeout=0.1)
        except holdfast.Empty:
            print("nothing is left")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/images")
