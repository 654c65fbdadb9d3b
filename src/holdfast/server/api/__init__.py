"""The HTTP API, version 1: each module has the routes of one subject."""
