"""The command `holdfast`: uses, inspects, checks and repairs queues, for people (tables) and scripts (JSON)."""
