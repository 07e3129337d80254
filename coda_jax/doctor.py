"""`python -m coda_jax.doctor`; see tools/doctor.py."""

import sys

from coda_jax.tools.doctor import main

if __name__ == "__main__":
    sys.exit(main())
