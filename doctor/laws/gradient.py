"""Law 5: a step is the mean over all samples."""

from ..law import Law

LAW = Law(5, "gradient", "A step is the mean over all samples")
