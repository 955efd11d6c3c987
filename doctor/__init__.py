"""Watches a data-parallel training job from outside, and says what is wrong with it."""
