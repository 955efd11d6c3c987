"""Benchmarks of the scripts, of their input pipeline and of doctor."""

from pathlib import Path

# The five scripts are the Python files in the project's folder
STRATEGIES = sorted(path.stem for path in Path(__file__).parent.parent.glob("*.py"))
