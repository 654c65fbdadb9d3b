"""Commands that put, take and settle messages, and hold locks."""
