"""Settings from a file and the environment: how they are written, read and explained."""
