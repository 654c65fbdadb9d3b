"""One hostile caller against a server, and what everyone else notices."""
