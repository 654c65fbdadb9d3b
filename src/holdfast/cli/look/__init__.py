"""Commands that show the state of things and change nothing."""
