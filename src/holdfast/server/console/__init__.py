"""The console: web pages at /ui. Everything they need is part of the package, so they work offline."""
