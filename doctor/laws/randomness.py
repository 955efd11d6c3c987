"""Law 3: random streams differ between ranks."""

from ..law import Law

LAW = Law(3, "randomness", "Random streams differ between ranks")
