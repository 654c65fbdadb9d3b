"""Backups of a data folder in a store, and restoring them."""
