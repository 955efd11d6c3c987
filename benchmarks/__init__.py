"""Benchmarks that compare our code's speed and memory with conventional code's."""

from pathlib import Path

# The five scripts are the Python files in the project's folder
STRATEGIES = sorted(path.stem for path in Path(__file__).parent.parent.glob("*.py"))
