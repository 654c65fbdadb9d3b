"""Reading: the data source, batches and streams of messages."""
