# Generated from aio/__init__.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""The ports of a server, for threads."""
