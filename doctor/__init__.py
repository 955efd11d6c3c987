"""Watch a data-parallel training job from outside, and report what is wrong."""
