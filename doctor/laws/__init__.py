"""The ten laws: importing this package defines their checks and watchers."""

from . import (  # noqa: F401
    alive,
    checkpoints,
    factors,
    files,
    gradient,
    losses,
    mean,
    meeting,
    modes,
    passes,
    places,
    printed,
    randomness,
    ranks,
    replicas,
    resume,
    samples,
    schedule,
    states,
    time,
)
