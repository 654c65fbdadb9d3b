"""Groups in stream mode: their members, the offsets that they committed, and queries that read from elsewhere."""
