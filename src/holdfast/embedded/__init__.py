"""The library face: the same broker in your process."""
