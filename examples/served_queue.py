"""A server is killed with -9 in the middle of the work and begun again; nothing that was acknowledged is lost.

Producers and workers are clients over HTTP. None of them does anything about the kill: their calls wait, and go on.
"""

import logging
import re
import subprocess
import sys
import tempfile
import threading

import holdfast

MESSAGES = 400


def serve(folder: str, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Begin a server; it says where it listens when it is ready."""
    command = [sys.executable, "-m", "holdfast", "serve", folder, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, int(re.findall(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())[0])


def main(folder: str) -> int:
    server, port = serve(folder)
    handled: dict[int, int] = {}
    half, all_done = threading.Event(), threading.Event()

    def handle(message: holdfast.Message[int]) -> None:
        handled[message.body] = handled.get(message.body, 0) + 1
        if len(handled) in (MESSAGES // 2, MESSAGES):
            (half if len(handled) < MESSAGES else all_done).set()

    try:
        with holdfast.open(f"http://127.0.0.1:{port}/orders", body_type=int) as orders:
            putting = threading.Thread(target=lambda: [orders.put(number) for number in range(MESSAGES)])
            with holdfast.Worker(handle, queue=orders, concurrency=4):
                putting.start()
                half.wait(timeout=60)
                server.kill()  # SIGKILL: nothing is closed, nothing is said
                server.communicate()
                server, _ = serve(folder, port)
                putting.join()
                all_done.wait(timeout=60)
            print(f"killed once; {MESSAGES} were put, {len(handled)} handled, {MESSAGES - len(handled)} lost")
            print(f"left in the queue: {orders.stats().ready}")
    finally:
        server.terminate()  # SIGTERM: it finishes what it has begun
        server.communicate()
    print(f"the server ended with {server.returncode}")
    return 0 if len(handled) == MESSAGES else 1


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(f"{temporary}/data"))
