"""Is a log as it should be, and what can be mended of it? Findings and plans are values; nothing is printed here."""
