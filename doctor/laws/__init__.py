"""The ten laws: importing this package defines their checks and watchers."""

from . import (  # noqa: F401
    accumulation,
    alive,
    files,
    gradient,
    losses,
    meeting,
    modes,
    passes,
    places,
    printed,
    randomness,
    ranks,
    replicas,
    samples,
    schedule,
    states,
    time,
)
