"""Law 10: time goes into work."""

from ..law import Law

LAW = Law(10, "time", "Time goes into work")


def time_table(job) -> dict[int, dict[str, float]]:
    """Return each rank's seconds per step by part; {} if too few steps were seen."""
    return {}
