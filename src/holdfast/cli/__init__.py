"""The command `holdfast`: looks into logs, checks and repairs them, for people (tables) and scripts (JSON)."""
