# Generated from aio/__init__.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""`open`, `open_broker` and `connect` for threads; those for threads are made of them."""
