"""Urgent messages first, others not before their time, some not after it, and one taken back.

python examples/priorities_and_delays.py
"""

import tempfile
import time
from datetime import UTC, datetime, timedelta

import holdfast


def main(folder: str) -> None:
    with holdfast.open(folder, body_type=str) as queue:
        queue.put("newsletter")
        queue.put("alarm", priority=9)  # 9 is the most urgent, 0 the default
        queue.put("invoice", priority=5)
        queue.put("a weather report", ttl=0.05)  # of no use to anybody in 50 ms
        queue.put("reminder", delay=0.3)
        mistake = queue.put("happy new year", at=datetime.now(UTC) + timedelta(days=400))
        (found,) = queue.messages("delayed", where='body ~ "year"')
        print(f"{found.id} waits until {found.due_at:%Y-%m}")
        print("cancelled:", queue.cancel(mistake.id))

        time.sleep(0.1)
        for _ in range(3):
            with queue.get(timeout=0) as message:
                print(message.priority, message.body)

        with queue.get(timeout=5) as message:  # waits for the reminder
            late_ms = (datetime.now(UTC) - message.due_at) / timedelta(milliseconds=1)
            print(f"{message.body}: not early, {'and in time' if late_ms < 1000 else f'{late_ms:.0f} ms late'}")
        print("expired:", queue.stats().metrics.expired)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/mail")
