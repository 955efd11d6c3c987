"""Measures in turns which strategies are faster, with a bounded chance of error."""
