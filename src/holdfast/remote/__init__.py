"""The port over HTTP or the owner's socket."""
