"""The code that blocks need and a page does not show, where it shows parts of a program; run before the first block."""

SETUPS = {
    "explain": """
import os
import tempfile

os.chdir(tempfile.mkdtemp())  # pictures are written
""",
}
