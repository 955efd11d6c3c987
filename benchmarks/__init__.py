"""Speed and memory against the usual way, side by side in one run."""
