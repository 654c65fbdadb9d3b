"""Writing: rows are staged as frames by tasks, and the driver's commit puts them into the log once."""
