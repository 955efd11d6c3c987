"""Measures which strategies are faster, in turns, with a bounded chance of error."""
