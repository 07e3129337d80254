"""Processes of one job choose the same tiles: the same user's table, or none, or an error."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest
from jax._src import distributed

from coda_jax.tiles import agreement, table


class Service:
    """The coordination service of a job, in one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite  # the first process may have been started again
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]


@pytest.fixture
def as_process(monkeypatch):
    """Takes the part of one of three processes."""
    service = Service()

    def take(index, client=service):
        agreement._is_agreed.cache_clear()
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(distributed.global_state, "client", client)

    yield take
    agreement._is_agreed.cache_clear()
    table._digest.cache_clear()


def test_all_processes_go_by_one_table(as_process, tmp_path, monkeypatch):
    def consulted(text, by="energy_delay"):
        path = tmp_path / "table.json"
        path.write_text(text)
        monkeypatch.setenv("CODA_JAX_TUNED", str(path) if text else "")
        monkeypatch.setenv("CODA_JAX_TILES_BY", by)
        table._digest.cache_clear()
        return agreement.may_consult(table.user_path(), table.chosen_by())

    as_process(0)
    assert consulted("{}")
    as_process(1)
    assert consulted("{}")
    for choices in (("{ }",), ("",), ("{}", "time")):
        as_process(2)
        with pytest.raises(RuntimeError, match="process 2 of 3 chooses tiles by another table"):
            consulted(*choices)


def test_where_nothing_can_be_compared_no_table_has_a_say(as_process, tmp_path):
    for client, reason in ((Service(), "chose no tile within 60 seconds"), (None, "no coordination service")):
        as_process(1, client)
        with pytest.warns(UserWarning, match=reason):
            assert not agreement.may_consult(tmp_path / "table.json", "energy_delay")


PROCESS = """
import sys, jax, jax.numpy as jnp
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import coda_jax as coda
from coda_jax.primitives import lowering
lowering.attached_device = lambda: "NVIDIA H200"
a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
for epilogue in (jnp.tanh, jnp.sin):
    try:
        lowered = jax.jit(lambda a: coda.gemm(a, a, epilogue=epilogue)).trace(a).lower(lowering_platforms=("cuda",))
        print("kernel" if "coda_gemm(" in lowered.as_text() else "no kernel")
    except RuntimeError as error:
        print(str(error)[:50])
client = jax._src.distributed.global_state.client
client.wait_at_barrier("end", 60000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_two_processes(same, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    tables = [tmp_path / name for name in "ab"]
    for path, text in zip(tables, ('{"format": 1, "devices": {}}', '{"format": 1, "devices":  {}}'), strict=True):
        path.write_text(text)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i)],
            cwd=pathlib.Path(__file__).parents[1],
            env={**os.environ, "CODA_JAX_TUNED": str(tables[0 if same else i]), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    of_first, of_second = (process.communicate(timeout=120)[0].splitlines() for process in processes)
    assert of_first == ["kernel"] * 2
    assert of_second == (["kernel"] * 2 if same else ["process 1 of 2 chooses tiles by another table, or "] * 2)
