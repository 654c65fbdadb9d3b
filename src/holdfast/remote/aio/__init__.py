"""The ports of a server, for tasks."""
