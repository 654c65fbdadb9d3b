"""`open`, `open_broker` and `connect` for tasks; those for threads are made of them."""
