"""The ports of an engine in this process, for tasks."""
