"""Law 7: printed numbers are true."""

from ..law import Law

LAW = Law(7, "printed", "Printed numbers are true")
