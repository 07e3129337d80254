"""What blocks need that a page does not say, for pages that show parts of a program; run before the first block."""

SETUPS = {
    "explain": """
import os
import tempfile

os.chdir(tempfile.mkdtemp())  # pictures are written
""",
}
