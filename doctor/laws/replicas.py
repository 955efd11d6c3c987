"""Law 4: replicas are equal."""

from ..law import Law

LAW = Law(4, "replicas", "Replicas are equal")
