"""The shell around storage and delivery: decide, journal, apply."""
