"""Holdfast's server beside others: each over the loopback, the server on one core and its clients on another."""
