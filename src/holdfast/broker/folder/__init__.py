"""A data folder: the names allowed in it, its layout, and the small files that record what must exist."""
