"""Python runs this file when it starts, because doctor puts this folder on PYTHONPATH.

After the process has imported PyTorch, doctor/record.py wraps PyTorch's functions. If
the user has a sitecustomize.py, that file runs first.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))


def load(name: str):
    """Import a module of doctor as part of a package with the unused name _doctor."""
    if "_doctor" not in sys.modules:
        package = sys.modules["_doctor"] = types.ModuleType("_doctor")
        package.__path__ = [os.path.dirname(HERE)]
    return importlib.import_module(f"_doctor.{name}")


class AfterImport:
    """Lets doctor's watchers install their hooks after a module has been imported."""

    calls = {"torch": "", "sklearn.metrics": "", "horovod.torch": "horovod_hooks"}
    calls |= {"torch.distributed.checkpoint": "checkpoint_hooks"}

    def find_spec(self, name: str, path=None, target=None):
        """Find a module as usual, and wrap the function that executes the module."""
        call = self.calls.pop(name, None)  # the search below calls this finder again
        if call is None:
            return None
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.calls[name] = call
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            if name == "torch" and "DOCTOR_CPU" in os.environ:
                load("cpu").play(os.environ["DOCTOR_CPU"])
            if name == "torch":
                load("record").torch_is_there()
            elif name == "sklearn.metrics":
                load("watcher").watch(module)
            else:
                load("watcher").tell(call, module)

        spec.loader.exec_module = exec_module
        return spec


# Run the user's own sitecustomize.py, which this file hides
others = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
found = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if found and found.loader:
    found.loader.exec_module(importlib.util.module_from_spec(found))
if os.environ.get("DOCTOR_FOLDER"):
    if os.environ.get("DOCTOR_MACHINES") and "RANK" in os.environ:
        os.environ["GROUP_RANK"] = os.environ["RANK"]
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    sys.meta_path.insert(0, AfterImport())
