"""The API with nothing but curl: put, take, keep state, ack, fail, look at the dead letter. Prints each call."""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from typing import Any


def curl(address: str, path: str, *arguments: str) -> Any:
    """Call, print, and answer with what came back."""
    command = ["curl", "--silent", "--show-error", f"{address}{path}", *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(f"$ curl $HOLDFAST_URL{path} {shlex.join(arguments)}".rstrip())
    print(said)
    return json.loads(said)


def main(address: str) -> None:
    curl(address, "/v1/queues/mails", "-X", "PUT", "-d", '{"settings": {"max_attempts": 1}}')
    curl(address, "/v1/queues/mails/enqueue?key=ann", "--data-binary", "dear Ann")  # any bytes, as they are
    more = '{"messages": [{"text": "dear Bob"}, {"json": {"to": "Cid"}}]}'
    curl(address, "/v1/queues/mails/batch", "-H", "content-type: application/json", "-d", more)

    ann, bob = curl(address, "/v1/queues/mails/dequeue", "-d", '{"count": 2, "wait": 5, "lease": 60}')["messages"]
    state = json.dumps({"receipt": ann["receipt"], "version": 0, "value": {"sent": 1}})
    curl(address, "/v1/queues/mails/state", "-X", "PUT", "-d", state)
    curl(address, "/v1/queues/mails/ack", "-d", json.dumps({"receipts": [ann["receipt"]]}))
    curl(address, "/v1/queues/mails/ack", "-d", json.dumps({"receipts": [ann["receipt"]]}))  # lease_lost
    failed = {"receipts": [bob["receipt"]], "error": "no such mailbox"}
    curl(address, "/v1/queues/mails/nack", "-d", json.dumps(failed))

    curl(address, "/v1/queues/mails/dead/groups")
    curl(address, "/v1/queues/mails/dead/redrive", "-d", "{}")
    curl(address, "/v1/queues/mails/stats")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        server = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve", f"{temporary}/data", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            main(re.findall(r"http://\S+", server.stdout.readline())[0])
        finally:
            server.terminate()
            server.communicate()
