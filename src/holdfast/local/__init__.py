"""The port on an engine in this process, for tasks (`aio`) and threads (`sync`); beside them what waits for nothing."""
