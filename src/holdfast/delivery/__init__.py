"""Who holds which message: pure, compact, journaled. Time is an argument."""
