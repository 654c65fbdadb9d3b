"""What a data folder can tell besides its messages, as tables."""
