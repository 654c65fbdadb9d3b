"""Tracing: the steps of a message's life, the log they go to, and who writes them down."""
