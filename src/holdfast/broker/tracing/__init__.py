"""Tracing: the steps of a message's life, the log that holds them, and the observers that record them."""
