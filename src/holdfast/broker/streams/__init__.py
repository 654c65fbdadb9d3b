"""Groups in stream mode: their members, their committed offsets, and queries that other processes run."""
