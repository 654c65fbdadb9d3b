# Generated from aio/__init__.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""What of a producer waits, for threads. The package `sync` beside this one is generated from it."""
