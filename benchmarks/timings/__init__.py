"""Measures which strategies are faster: they take turns, and chance is bounded."""
