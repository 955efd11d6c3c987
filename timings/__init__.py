"""Timings that decide: strategies take turns, and chance is counted."""
