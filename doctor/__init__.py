"""Watches a data-parallel training job from outside, and reports what is wrong with it."""
