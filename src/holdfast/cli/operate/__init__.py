"""Commands of an operator: topics, groups, dead letters, settings, check and repair."""
