"""Dedup ids: which ids were published to a topic within the window. Exact, crash-safe, and bounded in memory."""
