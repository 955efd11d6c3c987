"""Compare speed and memory with conventional code, side by side in one run."""
