"""HTTP/1.1 on asyncio: requests in, answers out, and nobody who holds a connection for nothing."""
