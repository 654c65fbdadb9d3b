"""Delivery is at least once; the effect happens once, because it is written together with the message's id.

python examples/exactly_once_effects.py
"""

import sqlite3
import tempfile

import holdfast


def credit(database: sqlite3.Connection, message: holdfast.Message) -> bool:
    """Book the amount and note the message in one transaction; False where that was done before."""
    with database:  # commits, or rolls back
        try:
            database.execute("INSERT INTO handled VALUES (?)", (message.id,))
        except sqlite3.IntegrityError:
            return False
        database.execute("UPDATE account SET balance = balance + ?", (message.body["amount"],))
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, sqlite3.connect(f"{temporary}/bank.db") as bank:
        bank.execute("CREATE TABLE handled (id TEXT PRIMARY KEY)")
        bank.execute("CREATE TABLE account AS SELECT 0 AS balance")
        with holdfast.open(f"{temporary}/payments", body_type=dict) as queue:
            queue.put({"amount": 100}, dedup_id="payment-1")
            print("put again:", queue.put({"amount": 100}, dedup_id="payment-1").duplicate)  # as after a timeout
            message = queue.get()
            print("booked:", credit(bank, message))  # and the process ends before the ack
        with holdfast.open(f"{temporary}/payments", body_type=dict) as queue, queue.get(timeout=1) as message:
            print("delivered again; booked:", credit(bank, message))
        print("balance:", bank.execute("SELECT balance FROM account").fetchone()[0])
    bank.close()
