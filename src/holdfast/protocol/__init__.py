"""The words of the wire: what server and clients say to each other, as plain values."""
