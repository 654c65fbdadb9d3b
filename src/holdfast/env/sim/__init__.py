"""A disk in memory that forgets what real disks may forget, for tests that pull the plug."""
