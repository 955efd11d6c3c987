"""Compare speed and memory with those of conventional code, in one run."""
