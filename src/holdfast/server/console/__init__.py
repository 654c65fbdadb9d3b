"""The console: pages for people at /ui, made here and served whole, so that they work without any other server."""
