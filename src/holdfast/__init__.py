"""Holdfast: a durable message queue for Python. What it acknowledged it never lets go of."""

__version__ = "0.1.0"
