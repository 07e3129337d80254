"""examples/train_lm.py on meshes: the losses of one device, checkpoints from mesh to mesh, several processes."""

import functools
import re
import signal
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.test_train_lm import EXAMPLES, finish, leaves, result, start, steps, wait_for_step

sys.path.insert(0, str(EXAMPLES))

import device_mesh
import train_lm
import trainer as trainers
from checkpoints import Checkpoints
from trainer import Settings, Trainer

SETTINGS = Settings(
    20, batch=8, context=16, width=32, layers=1, heads=2, dtype="float32", learning_rate=1e-2, seed=0, clip=0.5
)
TEXT = np.random.default_rng(0).integers(97, 123, 5000).astype(np.uint8)


DEVICES, make_mesh = jax.devices()[:4], device_mesh.make_mesh


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    """Are all that this process's meshes are made of."""
    monkeypatch.setattr(device_mesh, "make_mesh", functools.partial(make_mesh, devices=DEVICES))


def trainer_on(sizes, **changes):
    mesh = None if sizes is None else make_mesh(device_mesh.mesh_sizes(sizes), DEVICES)
    return Trainer(Settings(**vars(SETTINGS) | changes), TEXT, mesh)


def run(trainer, state, count):
    losses = []
    for _ in range(count):
        state, loss = trainer.step(state, trainer.text)
        losses.append(float(loss))
    return state, losses


@pytest.fixture(scope="module")
def on_one_device():
    trainer = trainer_on(None)
    state, losses = run(trainer, trainer.initial_state(), 6)
    return losses, trainer.validate(state["params"], TEXT[: 17 * 8].reshape(8, 17))


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_another_mesh_and_on_one_device(on_one_device, tmp_path):
    """Two steps each on two meshes, the second with accumulated gradients, then on one device."""
    expected, validation = on_one_device
    got = []
    for i, (sizes, changes) in enumerate([("data=2,fsdp=2", {}), ("fsdp=2,tensor=2", {"accumulate": 2}), (None, {})]):
        trainer, checkpoints = trainer_on(sizes, **changes), Checkpoints(tmp_path / "run", {})
        if i:
            assert checkpoints.latest_step == 2 * i
            state, history = checkpoints.restore(trainer.abstract_state)
            assert history == [{"step": 2 * i}]
        else:
            state = trainer.initial_state()
        for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(trainer.abstract_state), strict=True):
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim) and x.shape == like.shape
        state, losses = run(trainer, state, 2)
        got += losses
        checkpoints.save(2 * i + 2, state, [{"step": 2 * i + 2}])
        checkpoints.close()
        (tmp_path / "run" / ".lock").unlink()  # this process still has it
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    windows = TEXT[: 17 * 8].reshape(8, 17)
    assert trainer.validate(state["params"], windows) == pytest.approx(validation, rel=2e-5)


def bytes_a_device(tree):
    """The bytes of a tree on each device."""
    total = dict.fromkeys(DEVICES, 0)
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            total[shard.device] += shard.data.nbytes
    return list(total.values())


@pytest.mark.parametrize("name", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_fsdp_cuts_parameters_and_moments_by_four(name, monkeypatch):
    """Parameters and moments are cut by four; norms, which are vectors, and counts are all that each device has."""
    if name == "adamw":
        monkeypatch.setattr(trainers, "make_optimizer", lambda settings: optax.adamw(1e-3))
    trainer = trainer_on("fsdp=4", width=64, heads=4)
    state = trainer.initial_state()
    for _ in range(2):  # what the step returns lies as what it was given
        held = bytes_a_device(state)
        replicated = [x for x in jax.tree.leaves(state) if x.sharding.is_fully_replicated]
        assert all(x.ndim < 2 and x.size <= 64 for x in replicated)
        total = sum(x.nbytes for x in jax.tree.leaves(state))
        everywhere = sum(x.nbytes for x in replicated)
        assert held == [(total - everywhere) // 4 + everywhere] * 4
        assert everywhere < total / 50
        moments = {"muon": 1, "adamw": 2}[name]
        kernel = state["params"]["layers"][0]["mlp"]["down"]["kernel"][...]
        like = [x for x in jax.tree.leaves(state["opt"]) if x.shape == kernel.shape]
        assert len(like) == moments and all(x.sharding == kernel.sharding for x in like)
        given = state
        state, _ = trainer.step(given, trainer.text)
        assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.ndim > 1)


@pytest.mark.slow
def test_gradients_of_parts_are_summed(on_one_device):
    trainer = trainer_on(None, accumulate=4)
    np.testing.assert_allclose(run(trainer, trainer.initial_state(), 3)[1], on_one_device[0][:3], rtol=2e-5)


def test_the_gradient_is_clipped():
    gradient = {"w": jnp.array([3.0, 4.0])}
    optimizer = trainers.make_optimizer(Settings(**vars(SETTINGS) | {"clip": 0.5}))
    plain = trainers.make_optimizer(Settings(**vars(SETTINGS) | {"clip": 0.0}))
    clipped = optimizer.update(gradient, optimizer.init(gradient), gradient)[1]
    expected = plain.update({"w": jnp.array([0.3, 0.4])}, plain.init(gradient), gradient)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped[1], expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--mesh=data=3", r"--mesh data=3: the sizes multiply to 3, and there are 4 devices"),
        ("--mesh=data=2,model=2", r"unknown axis 'model' .*; axes are data, fsdp, tensor"),
        ("--mesh=data=2,data=2", r"data comes twice"),
        ("--mesh=data=two", r"'data=two' .* must be data=SIZE, a positive integer"),
        ("--mesh=data=4 --batch=6", r"--batch 6 must be a multiple of 4"),
        ("--accumulate=2 --mesh=data=2,fsdp=2 --batch=12", r"--batch 12 must be a multiple of 8: --accumulate 2 parts"),
        ("--clip=nan", r"--clip must be a number, at least 0"),
        ("--distributed", r"--distributed: .* Outside of a job of Slurm or Open MPI give --coordinator"),
        ("--coordinator=localhost:1234", r"--coordinator, --processes and --process come together"),
        ("--coordinator=localhost:1234 --processes=2 --process=2", r"--process 2 must be from 0 to .* = 1"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_lm.main(arguments.split())
    assert re.search(message, capsys.readouterr().err)


def test_a_mesh_that_does_not_divide_the_model(tmp_path, capsys):
    arguments = ["--mesh=fsdp=4", "--width=6", "--heads=1", "--batch=4"]
    assert train_lm.main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert re.search(r"--mesh: .*embed.* of 6 mesh axes fsdp=4 do not divide evenly", capsys.readouterr().err)


SHORT = ("--steps=60", "--batch=8")


def check_same_result(out, expected):
    """Losses, and the parameters' and the optimizer's arrays."""
    (got, history), (want, want_history) = result(out, 60), result(expected, 60)
    for key in ("train", "validation"):
        assert history[-1][key] == pytest.approx(want_history[-1][key], rel=1e-4)
    assert len(leaves(got)) == len(leaves(want)) > 20
    for a, b in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2 * np.abs(b).max())


@pytest.mark.slow
def test_a_run_killed_on_a_mesh_resumes_on_another(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    code, output = finish(start(tmp_path / "one", *SHORT))
    assert code == 0, output
    killed = start(tmp_path / "run", *SHORT, "--mesh=data=2,fsdp=2")
    wait_for_step(killed, tmp_path / "run", 20)
    killed.send_signal(signal.SIGKILL)
    finish(killed)
    reached = steps(tmp_path / "run")[-1]
    code, output = finish(start(tmp_path / "run", *SHORT, "--mesh=fsdp=2,tensor=2"))
    assert code == 0, output
    assert f"resuming at step {reached} of" in output and "4 x cpu (fsdp=2, tensor=2; processes: 1)" in output
    check_same_result(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
def test_two_processes_train_to_the_losses_of_one(tmp_path, monkeypatch):
    """They stop together when one is interrupted, and resume."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    mesh = "--mesh=data=2,fsdp=2"
    code, output = finish(start(tmp_path / "one", *SHORT, mesh))
    assert code == 0, output
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")

    def start_two():
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"--coordinator=localhost:{free.getsockname()[1]}"
        return [start(tmp_path / "two", *SHORT, mesh, address, "--processes=2", f"--process={i}") for i in range(2)]

    first, second = start_two()
    wait_for_step(first, tmp_path / "two", 20)
    second.send_signal(signal.SIGINT)
    (code, output), (other, _) = finish(first), finish(second)
    assert code == other == 128 + signal.SIGINT, output
    assert "the same command resumes" in output
    (code, output), (other, silent) = map(finish, start_two())
    assert code == other == 0, output + silent
    assert "resuming at step" in output and "processes: 2" in output and "bits per byte" not in silent
    check_same_result(tmp_path / "two", tmp_path / "one")
    code, output = finish(start(tmp_path / "two", *SHORT))  # one process reads it, on one device
    assert code == 0 and "already finished" in output, output
