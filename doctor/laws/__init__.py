"""The ten laws: importing this package defines their checks and watchers."""

from . import (  # noqa: F401
    alive,
    files,
    gradient,
    losses,
    meeting,
    modes,
    printed,
    randomness,
    ranks,
    replicas,
    samples,
    schedule,
    time,
)
