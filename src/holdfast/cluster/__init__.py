"""A cluster: where topics live, which nodes there are, and which of them should own what."""
