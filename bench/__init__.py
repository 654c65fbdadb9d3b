"""Holdfast's benchmarks: ours and its peers side by side, on one machine, in one run."""
