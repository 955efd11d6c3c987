"""The ten laws: importing this package defines their checks and watchers."""

from importlib import import_module
from pkgutil import iter_modules

for one in iter_modules(__path__):
    import_module(f"{__name__}.{one.name}")
