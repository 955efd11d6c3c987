"""Read the headers of the labs: the symptom, the checks and the lesson."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass
class Lab:
    """The `name: value` lines in the docstring of a lab's script."""

    number: str
    script: str  # the file's name
    symptom: str
    grader: str  # a part of the grader's message
    checks: dict[str, dict]  # functions of checks.py, with options
    doctor: str  # the doctor's finding, or "-"
    lesson: str  # the folder of the lesson that the lab needs
    path: str = "optional"  # or "core"
    processes: str = "2, 1, 6"  # numbers of processes in which the grader runs it


def labs(folder: Path = FOLDER) -> dict[str, Lab]:
    """Read the headers of all labs, by number, and that of the capstone."""
    found = {}
    for path in [*sorted(folder.glob("[0-9][0-9]_*.py")), folder / "capstone.py"]:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        pairs = re.findall(r"^(\w+): (.+(?:\n  .+)*)", docstring, re.M)
        facts = {name: " ".join(value.split()) for name, value in pairs}
        calls = re.findall(r"(\w+)(\(.*?\))?(?:, |$)", facts.pop("checks"))
        checks = {name: eval(f"dict{options or '()'}") for name, options in calls}
        number = path.stem.split("_")[0]
        found[number] = Lab(number, path.name, checks=checks, **facts)
    return found
