"""Dedup ids: which were put to a topic within the window, exact, kept across crashes, in bounded memory."""
