# Generated from aio/__init__.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""The faces for threads, and the ports that they stand on."""
