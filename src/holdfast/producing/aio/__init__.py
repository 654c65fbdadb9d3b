"""What of a producer waits, for tasks. The package `sync` beside this one is generated from it."""
