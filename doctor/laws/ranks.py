"""Law 2: ranks are exchangeable."""

from ..law import Law

LAW = Law(2, "ranks", "Ranks are exchangeable")
