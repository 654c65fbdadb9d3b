"""The server: one process that owns a data folder and speaks HTTP."""
