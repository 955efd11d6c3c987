"""Law 1: every sample is read once per epoch."""

from ..law import Law

LAW = Law(1, "samples", "Every sample is read once per epoch")
