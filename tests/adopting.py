"""The program of examples/adopting, which fetches packages and compares both copies."""

import functools
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "adopting"


@functools.cache
def program():
    """The names that run.py defines."""
    sys.path.insert(0, str(FOLDER))
    try:
        return runpy.run_path(str(FOLDER / "run.py"))
    finally:
        sys.path.remove(str(FOLDER))
