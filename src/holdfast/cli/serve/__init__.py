"""Commands that run until they are told to end: the server and the console."""
