"""Who holds which lock, and the documents beside them. Pure: time is an argument, and nothing is read or written."""
