"""The faces of a broker that lives elsewhere: behind a server's address, or in another process on this machine."""
