"""A node of a cluster: it owns some shards, passes calls for the others on to their owners, and answers for all."""
