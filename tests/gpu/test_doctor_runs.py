"""On a machine where kernels run, `python -m coda_jax.doctor` finds no fault."""

import re

import pytest

from coda_jax.tools import doctor

pytestmark = pytest.mark.gpu


def test_nothing_is_broken(capsys):
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert re.search(r"ok +GPU +.*compute capability 9\.0", out)
    for dtype in ("bfloat16", "float8_e4m3fn"):
        assert re.search(rf"ok +kernel +{dtype} ran, off by", out)
