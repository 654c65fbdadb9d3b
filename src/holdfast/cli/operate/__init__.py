"""Commands for operators: topics, groups, dead letters, settings, check and repair."""
