"""Law 8: one process writes each file."""

from ..law import Law

LAW = Law(8, "files", "One process writes each file")
