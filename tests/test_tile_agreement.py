"""Processes of one job choose the same tiles: the same user's table, or none, or an error."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax._src import distributed

import coda_jax as coda
from coda_jax.tiles import agreement, table
from tests.tuned import DEVICE, key_of


class Service:
    """The coordination service of a job, in one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
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
    table._load.cache_clear()


def test_all_processes_go_by_one_table(as_process, tmp_path, monkeypatch):
    def consulted(text, by="energy_delay"):
        path = tmp_path / "table.json"
        path.write_text(text)
        monkeypatch.setenv("CODA_JAX_TUNED", str(path) if text else "")
        monkeypatch.setenv("CODA_JAX_TILES_BY", by)
        table._load.cache_clear()
        return agreement.may_consult(table.user_path(), table.chosen_by(), by)

    as_process(0)
    assert consulted("{}")
    as_process(1)
    assert consulted("{}")
    for choices in (("{ }",), ("",), ("{}", "time")):
        as_process(2)
        with pytest.raises(RuntimeError, match="process 2 of 3 chooses tiles by another table"):
            consulted(*choices)


def test_where_nothing_can_be_compared_no_table_has_a_say(as_process, tmp_path):
    for client, reason in ((Service(), "chose no tile while another one waited 60 seconds"), (None, "no coordination")):
        as_process(1, client)
        with pytest.warns(UserWarning, match=reason):
            assert not agreement.may_consult(tmp_path / "table.json", "a energy_delay", "energy_delay")


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_a_late_first_process_goes_by_what_the_others_do(as_process, tmp_path, order):
    """No table has a say then: their own tables differ, and nobody knew. The other settings must be the same."""
    for index in order:
        as_process(index)
        with pytest.warns(UserWarning, match="is not consulted: the first process chose no tile"):
            assert not agreement.may_consult(tmp_path / f"{index}.json", f"{index} energy_delay", "energy_delay")
    for index in range(3):
        as_process(index)
        with pytest.raises(RuntimeError, match=f"process {index} of 3 chooses tiles by another table, or another CODA"):
            agreement.may_consult(None, "none time", "time")


def test_a_first_process_whose_table_has_changed_is_told(as_process, tmp_path):
    """The others may have begun: none of them reads a second verdict."""
    as_process(0)
    assert agreement.may_consult(tmp_path / "table.json", "a time", "time")
    assert agreement.may_consult(tmp_path / "table.json", "a time", "time")
    with pytest.raises(RuntimeError, match=r"process 0 of 3 chooses tiles by another table.*than the others"):
        agreement.may_consult(tmp_path / "table.json", "b time", "time")
    as_process(1)
    assert agreement.may_consult(tmp_path / "table.json", "a time", "time")


@pytest.mark.parametrize("index", [0, 1])
def test_a_service_that_does_not_answer_is_an_error(as_process, index):
    """Else each process would go by its own."""

    class Gone(Service):
        def key_value_set(self, *_):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    as_process(index, Gone())
    with pytest.raises(RuntimeError, match="cannot be compared between processes"):
        agreement.may_consult(None, "none time", "time")


PROCESS = """
import sys, jax, jax.numpy as jnp
address, index, is_late = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "late"
jax.distributed.initialize(address, 2, index)
import coda_jax as coda
from coda_jax.lowering import select
from coda_jax.tiles import agreement
from tests.tuned import DEVICE, cuts
select.attached_device = lambda: DEVICE
jax.devices()  # which all processes ask for together
client = jax._src.distributed.global_state.client
if is_late:
    agreement.TIMEOUT_SECONDS = 1
    if index == 0:
        client.wait_at_barrier("second has lowered", 60000)
a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
for epilogue in (jnp.tanh, jnp.sin):
    try:
        lowered = jax.jit(lambda a: coda.gemm(a, a, epilogue=epilogue)).trace(a).lower(lowering_platforms=("cuda",))
        print(*cuts(lowered.as_text()))
    except RuntimeError as error:
        print(str(error)[:50])
if is_late and index == 1:
    client.wait_at_barrier("second has lowered", 60000)
client.wait_at_barrier("end", 60000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "other", "late"])
def test_two_processes(kind, tmp_path):
    """One table in both; a table each; a table each where the first process begins when the second one has waited."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    a, tiles = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), ({"tile_m": 64, "tile_n": 256}, {"tile_m": 128})
    key = key_of(lambda a: coda.gemm(a, a, epilogue=jnp.tanh), a)
    tables = [tmp_path / name for name in "ab"]
    for path, tile in zip(tables, tiles, strict=True):
        path.write_text(json.dumps({"format": 1, "devices": {DEVICE: {key: {"config": tile}}}}))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), kind],
            cwd=pathlib.Path(__file__).parents[1],
            env={**os.environ, "CODA_JAX_TUNED": str(tables[0 if kind == "same" else i]), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    of_first, of_second = (process.communicate(timeout=120)[0].splitlines() for process in processes)
    assert len(of_first) == 2 and of_first[0].startswith("(64, 256, ") == (kind != "late"), of_first
    refused = ["process 1 of 2 chooses tiles by another table, or "] * 2
    assert of_second == (refused if kind == "other" else of_first)
