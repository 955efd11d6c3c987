"""Law 9: all ranks meet."""

from ..law import Law

LAW = Law(9, "meeting", "All ranks meet")
