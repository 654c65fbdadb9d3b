"""Checking a log and repairing it. Findings and plans are values; nothing is printed here."""
