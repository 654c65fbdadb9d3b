"""Ports on an engine in this process, for tasks (`aio`) and threads (`sync`), and the code that both share."""
