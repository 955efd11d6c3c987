"""Compares speed and memory with the usual way, side by side in one run."""
