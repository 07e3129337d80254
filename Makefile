# make train | test | test-all | docs | wheels | wheels-test | host-sanitize | gpu-test | gpu-sanitize | bench | report | kernels-diff | lint | clean. Each sets up what it needs in $(VENV); a second run is quick.
#   PYTHON=...   the interpreter to make the environment from (3.11 to 3.13)
#   VENV=...     where the environment lies
#   JAX=0.10.2   a jax version other than the newest supported one
#   EXTRA=parity one more of pyproject.toml's extras, here that of the comparison with Hugging Face transformers
#   SYSTEM=1     no environment, no network: build into PYTHON, which has jax, flax, nanobind and scikit-build-core already
#   ARGS=...     arguments of examples/train_lm.py, pytest or the benchmarks
comma := ,
VENV ?= .venv
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c "$(SUPPORTED)" 2>/dev/null && { echo $$python; break; }; done)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard coda_jax/ffi/*.cc coda_jax/ffi/*.h)

ifeq ($(SYSTEM),1)
RUN := $(PYTHON)
STAMPS := build/system
TOOLS :=
else
RUN := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
TOOLS := $(VENV)/bin/
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
CUDA := $(if $(filter-out 0,$(GPU)),$(comma)cuda)
endif


.PHONY: train test test-all docs docs-serve docs-links docs-device wheels wheels-test host-sanitize gpu-test gpu-sanitize bench report kernels-diff lint clean
.DELETE_ON_ERROR:

train: $(STAMPS)/train
	$(RUN) examples/train_lm.py $(ARGS)

# Without ARGS the quickest tests of each file and those that are marked smoke, with a seventh of their parameters
# (tests/conftest.py); test-all has the rest. Each file runs on one worker: what its tests share, compiled programs above
# all, is made once.
test: $(STAMPS)/test
	CODA_JAX_TEST_SAMPLE="$${CODA_JAX_TEST_SAMPLE-$(if $(ARGS),,0/7)}" $(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

test-all: $(STAMPS)/test
	CODA_JAX_TEST_SAMPLE= CODA_JAX_TEST_SLICE= $(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

docs: $(STAMPS)/docs # build/docs/index.html: every Python block is executed, on a CPU; a warning is an error
	$(RUN) -m sphinx -W --keep-going docs build/docs $(ARGS)

docs-serve: docs
	$(RUN) -m http.server --bind 127.0.0.1 --directory build/docs 8000

docs-links: docs # those inside the documentation; links to elsewhere need a network and are not looked at
	PYTHONPATH=docs $(RUN) -m tools.links build/docs

docs-device: $(STAMPS)/docs # docs/device: the outputs that need a GPU
	PYTHONPATH=docs $(RUN) -m tools.device_outputs $(ARGS)

wheels: # into dist: one for each supported Python, and the sdist
	.ci/wheels

wheels-test: # in fresh environments without a compiler, with the oldest and the newest jax
	.ci/wheels test

host-sanitize: $(STAMPS)/test
	tests/host_sanitize $(RUN)

# Two runs of pytest, for XLA's autotuning would take nine tenths of the time: without it, in processes that share the GPU,
# all tests but those that time kernels; then these, with the GPU to themselves. With CODA_JAX_TEST_SLICE=0/2 and then 1/2
# in the environment it is done in two halves. A run that has nothing of what ARGS chooses ends with 5. (Where
# pytest-benchmark is installed it warns of such processes before the first test, and a warning is an error.)
GPU_TESTS := -m pytest -p no:benchmark $(if $(findstring tests/gpu,$(ARGS)),,tests/gpu)
gpu-test: export CODA_JAX_TEST_REQUIRES := hopper,nvrtc
gpu-test: $(STAMPS)/test # without a Hopper GPU it fails
	shared=0; alone=0; \
	XLA_FLAGS="$$XLA_FLAGS --xla_gpu_autotune_level=0" XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  $(RUN) $(GPU_TESTS) -m "gpu and not timed" -n logical --maxprocesses 12 --dist worksteal $(ARGS) || shared=$$?; \
	$(RUN) $(GPU_TESTS) -m "gpu and timed" $(ARGS) || alone=$$?; \
	case $$shared$$alone in 00 | 05 | 50) ;; *) exit 1 ;; esac

gpu-sanitize: $(STAMPS)/test
	for tool in memcheck racecheck; do \
	  XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool $$tool --error-exitcode 1 \
	    --target-processes application-only --kernel-name kernel_substring=coda_ \
	    $(RUN) -m tests.gpu.sanitized || exit 1; \
	done

bench: $(STAMPS)/bench
	$(RUN) -m benchmarks $(ARGS)

bench-%: $(STAMPS)/bench # train_step, family_step, fused_models, attention, layer, loss_head, loss_curve, launch, muon, plots
	$(RUN) -m benchmarks.$* $(ARGS)

lab-%: $(STAMPS)/bench # tiles, tiles_energy, energy, ablation, joined, between_kernels, host_launch, load_memory, schedule
	$(RUN) -m benchmarks.lab.$* $(ARGS)

report: $(STAMPS)/bench # benchmarks/REPORT.md, its pictures and the README's table, from benchmarks/results
	$(if $(ARGS),,$(RUN) -m benchmarks.plots)
	$(RUN) -m benchmarks.report $(ARGS)
	PYTHONPATH=docs $(RUN) -m tools.made $(ARGS)

kernels-diff: $(STAMPS)/dev # A=<commit> B=<commit>: whether every product has the same kernel on both
	$(RUN) -m benchmarks.lab.kernels_diff $(A) $(B) $(ARGS)

lint: $(STAMPS)/dev
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(TOOLS)clang-format --dry-run -Werror $$(git ls-files 'cuda/*.cuh' 'coda_jax/ffi/*.cc' 'coda_jax/ffi/*.h' 'benchmarks/*.cc' 'benchmarks/*.cu' 'benchmarks/*.h')

clean:
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp an extra; each of train, bench, test and dev holds those before it, docs holds train. Installing compiles the small FFI module.
$(STAMPS)/%: $(SOURCES)
	@$(or $(PYTHON),false) -c "$(SUPPORTED)" || { echo "coda_jax needs Python 3.11 to 3.13: make PYTHON=..." >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "coda_jax needs a C++20 compiler (g++ 10, clang 14 or newer; CXX=...)" >&2; exit 1; }
ifeq ($(SYSTEM),1)
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .
else
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing coda_jax with its $* dependencies into $(VENV) (minutes, once)"
	$(VENV)/bin/python -m pip install -q --no-compile --disable-pip-version-check -e ".[$*$(CUDA)$(if $(EXTRA),$(comma)$(EXTRA))]" $(if $(JAX),jax==$(JAX))
endif
	@mkdir -p $(STAMPS)
	@touch $(STAMPS)/train $(if $(filter bench test dev,$*),$(STAMPS)/bench) $(if $(filter test dev,$*),$(STAMPS)/test) $@
