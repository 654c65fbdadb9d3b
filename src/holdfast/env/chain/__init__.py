"""A folder that lives in a store: each change of a file is also a record in a chain of numbered objects."""
