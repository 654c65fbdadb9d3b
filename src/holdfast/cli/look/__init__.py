"""Commands that show how things stand, and change nothing."""
