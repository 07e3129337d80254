"""examples/train_lm.py: killed and interrupted runs resume to an undisturbed one's very result; text and baseline."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import coda_jax as coda
from flax_layers import Llama, LlamaConfig

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import report  # noqa: E402
import stdlib_text  # noqa: E402
import train_lm  # noqa: E402
from trainer import Trainer  # noqa: E402

STEPS = 240
ARGUMENTS = f"--steps={STEPS} --batch=2 --context=32 --width=16 --layers=1 --heads=2 --checkpoint-every=20".split()


def start(out, *more, program=(str(EXAMPLES / "train_lm.py"),)):
    command = [sys.executable, "-W", "error", *program, *ARGUMENTS, "--out", str(out), *more]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # Every run here compiles the same programs.
        "JAX_COMPILATION_CACHE_DIR": os.environ["CODA_JAX_CACHE_DIR"] + "/programs",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **output)


def finish(process):
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def steps(out):
    return sorted(int(path.name) for path in (out / "checkpoints").glob("*") if path.name.isdigit())


def wait_for_step(process, out, step):
    deadline = time.monotonic() + 300
    while not any(found >= step for found in steps(out)):
        assert process.poll() is None, f"ended before step {step}:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def result(out, step=STEPS):
    """Arrays and history of a checkpoint, by default the last one's."""
    folder = out.resolve() / "checkpoints" / str(step)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder / "state").item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)  # of any mesh
        state = checkpointer.restore(folder / "state", restore_args=as_numpy)
    return state, json.loads((folder / "history" / "metadata").read_text())


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    return [] if tree is None else [np.asarray(tree)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    code, output = finish(start(out))
    assert code == 0, output
    return out, output


@pytest.mark.slow
def test_a_killed_and_an_interrupted_run_resume_to_the_same_result(undisturbed, tmp_path):
    killed = start(tmp_path)
    wait_for_step(killed, tmp_path, 20)
    killed.send_signal(signal.SIGKILL)
    code, output = finish(killed)
    assert code == -signal.SIGKILL
    reached = steps(tmp_path)[-1]
    assert 20 <= reached < STEPS, output

    interrupted = start(tmp_path)
    wait_for_step(interrupted, tmp_path, reached + 1)
    interrupted.send_signal(signal.SIGINT)
    code, output = finish(interrupted)
    assert f"resuming at step {reached} of {STEPS}" in output
    assert code == 128 + signal.SIGINT, output
    saved = int(re.search(r"saved at step (\d+) in .*; the same command resumes", output)[1])
    assert steps(tmp_path)[-1] == saved

    code, output = finish(start(tmp_path))
    assert code == 0, output
    assert f"resuming at step {saved} of {STEPS}" in output
    (expected, expected_history), (got, history) = result(undisturbed[0]), result(tmp_path)
    assert len(leaves(got)) == len(leaves(expected)) > 20
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {h["step"]: h["validation"] for h in expected_history}.items() <= {
        h["step"]: h["validation"] for h in history
    }.items()


# Ends at the change of this number that is made to the folder of checkpoints once step FIRST is there.
KILLED = """
import os, signal, sys
examples, out, first, count = sys.argv[1:5]
del sys.argv[1:5]
count = int(count)

def hook(event, arguments):
    global count
    if event in ("os.rename", "os.mkdir", "os.remove", "shutil.rmtree") and str(arguments[0]).startswith(out):
        count -= os.path.isdir(f"{out}/checkpoints/{first}")
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
sys.path.insert(0, examples)
import train_lm
sys.exit(train_lm.main())
"""


@pytest.mark.slow
def test_a_run_killed_while_it_saves_and_on_a_full_disk_resumes_to_the_same_result(undisturbed, tmp_path):
    reached, left = 0, []
    for count in (0, 2, 5, 9, 14):
        program = ("-c", KILLED, str(EXAMPLES), str(tmp_path.resolve()), str(reached + 20), str(count))
        code, output = finish(start(tmp_path, program=program))
        assert code == -signal.SIGKILL, output
        assert f"resuming at step {reached} of {STEPS}" in output or not reached
        reached = steps(tmp_path)[-1]
        left += (tmp_path / "checkpoints").glob("*tmp*")
    assert left, "none was killed while it wrote"

    process = start(tmp_path)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))  # long before it writes
    code, output = finish(process)
    assert code == 1, output
    told = (
        rf"train_lm: the checkpoint of step {reached + 20} cannot .*File too large.* that of step {reached}; make room"
    )
    assert re.search(told, output), output  # in one line; threads of Orbax write others before it and after it

    code, output = finish(start(tmp_path))
    assert code == 0, output
    assert f"resuming at step {reached} of {STEPS}" in output
    (expected, _), (got, _) = result(undisturbed[0]), result(tmp_path)
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))


def test_finished_run_shows_sample_losses_and_kernels(undisturbed):
    out, output = undisturbed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    step, bits = re.search(
        r"--- sample of the best checkpoint, step (\d+), (\S+) bits per byte ---\nimport os", output
    ).groups()
    assert re.search(
        rf"validation: {bits} bits per byte at step {step}; \d\.\d+ (lower|higher) than a byte bigram's 3\.\d+", output
    )
    ran = "XLA's form ran for 15 products: the platform is cpu\n0 kernels of 15 products in the compiled step\n"
    assert output.endswith(ran)
    losses = [float(x) for x in re.findall(r"validation (\d\.\d+) bits per byte", output)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.smoke
def test_the_best_checkpoint_is_sampled_and_judged(tmp_path, monkeypatch, capsys):
    """One that is neither the last nor the one before."""
    validations, validate, judged = iter([3.0, 1.5, 2.0, 2.5]), Trainer.validate, []

    def told(self, params, windows):
        judged.append(leaves(jax.tree.map(np.asarray, nnx.to_pure_dict(params))))
        return next(validations, None) or validate(self, params, windows)

    monkeypatch.setattr(Trainer, "validate", told)
    monkeypatch.setattr(Trainer, "sample", lambda self, params, prompt, length: told(self, params, few) and prompt)
    few = np.zeros((1, 33), np.uint8)
    arguments = [*ARGUMENTS, "--steps=4", "--checkpoint-every=1", "--out", str(tmp_path)]
    second = None
    for count in (4, 0):  # again when it is finished
        del judged[:]
        assert train_lm.main(arguments) == 0
        assert "--- sample of the best checkpoint, step 2, " in (output := capsys.readouterr().out)
        assert re.search(r"bits per byte at step 2; ", output)
        *during, at_end, of_sample = judged
        assert len(during) == count
        second = during[1] if during else second
        for got in (at_end, of_sample):
            for a, b in zip(got, second, strict=True):
                np.testing.assert_array_equal(a, b)
        assert steps(tmp_path) == [2, 3, 4]
        (tmp_path / ".lock").unlink()  # this process still has it


def test_run_report_names_the_fused_kernels():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Llama(LlamaConfig(vocab_size=64, **sizes), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)

    def gradient(params, tokens):
        return jax.grad(lambda params: nnx.merge(graph, params).loss(tokens, tokens))(params)

    tokens = jnp.zeros((2, 128), jnp.int32)
    text = report.what_ran(coda.explain(gradient, params, tokens, platform="cuda"), 27)
    assert re.search("^    2  LlamaBlock_2           rms_norm, gated$", text, re.MULTILINE)
    assert re.search("^    2  LlamaBlock_backward_0  gated, gated backward, ", text, re.MULTILINE)
    assert text.endswith("27 kernels of 27 products in the compiled step") and "gemm" not in text and "XLA" not in text
    wide = report.what_ran(coda.explain(gradient, params, tokens, platform="cpu"), 0)
    told = "XLA's form ran for 27 products: the platform is cpu\n0 kernels of 27 products in the compiled step"
    assert wide == told


@pytest.mark.slow
def test_float16_trains(tmp_path):
    code, output = finish(start(tmp_path, "--dtype=float16", "--steps=60"))
    assert code == 0, output
    losses = [float(x) for x in re.findall(r"validation (\d\.\d+) bits per byte", output)]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.2


@pytest.mark.slow
def test_a_finished_run_says_so_and_other_settings_are_refused(undisturbed):
    out, before = undisturbed
    code, output = finish(start(out))
    assert code == 0
    assert "already finished; delete" in output
    assert re.findall("validation: .*", output) == re.findall("validation: .*", before)
    code, output = finish(start(out, "--seed=1"))
    assert code == 2
    assert re.search(r"other settings \(seed: 0 there, 1 now\)", output)


@pytest.mark.slow
def test_a_folder_in_use_and_folders_that_cannot_be_used(tmp_path):
    running = start(tmp_path / "run", "--steps=1000000")
    wait_for_step(running, tmp_path / "run", 20)
    code, output = finish(start(tmp_path / "run"))
    running.kill()
    finish(running)
    assert code == 2 and "another process is training in" in output

    (tmp_path / "run" / "settings.json").write_text("{")
    code, output = finish(start(tmp_path / "run"))
    assert code == 2 and re.search(r"has checkpoints, but .*settings\.json cannot be read", output)


def test_arguments_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert train_lm.main(["--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert train_lm.main(["--out", str(tmp_path / "new"), "--context=10000000"]) == 2
    assert re.search(r"--context: a text of \d+ bytes has no window of 10000000 bytes", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        train_lm.main(["--learning-rate=nan"])
    assert "--learning-rate must be a positive number" in capsys.readouterr().err


def test_splits_are_whole_files_and_do_not_overlap(tmp_path):
    names = [f"module{i}.py" for i in range(40)] + ["package/inner.py"]
    for name in [*names, "test/test_module.py", "site-packages/other.py", "encodings/cp037.py", "config-3/build.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert stdlib_text.source_files(tmp_path) == sorted(names)
    train, validation = (text.tobytes().decode().split("\0")[:-1] for text in stdlib_text.load(tmp_path))
    assert sorted(train + validation) == sorted(names)
    assert validation == [name for name in sorted(names) if stdlib_text.is_held_out(name)] != []


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no sources of the standard library under"):
        stdlib_text.load(tmp_path)


def test_windows_cover_every_prediction_once():
    text = np.arange(100, dtype=np.uint8)
    windows = stdlib_text.windows(text, 9, limit=100)
    assert windows.shape == (11, 10)
    np.testing.assert_array_equal(windows[:, 1:].ravel(), np.arange(1, 100))
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])
    assert stdlib_text.windows(text, 9, limit=3).tolist() == [windows[i].tolist() for i in (0, 5, 10)]
    with pytest.raises(ValueError, match="a text of 5 bytes has no window of 9 bytes"):
        stdlib_text.windows(text[:5], 9, limit=3)


def test_bigram_against_its_formula():
    train = np.frombuffer(b"abababac", np.uint8)
    a, b, c, d = b"abcd"

    def p(byte):
        return (np.count_nonzero(train == byte) + 1) / (len(train) + 256)

    windows = np.array([[a, b, a, c, d]])
    # Pairs of train: ab three times, ba three times, ac once.
    expected = [(3 + p(b)) / 5, (3 + p(a)) / 4, (1 + p(c)) / 5, p(d) / 1]
    assert stdlib_text.bigram_bits_per_byte(train, windows) == pytest.approx(-np.log2(expected).mean())
