"""A data folder: which names may be given, where things lie, and the small files that say what must be there."""
