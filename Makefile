# Every target sets itself up: a machine with Python 3.11+ and make is enough. See `make help`.

VENV ?= .venv
# Extras beyond what a target needs and what the machine's drivers ask for, e.g. EXTRAS=cuda13 to compile kernels
# without a GPU; CONSTRAINTS names a pip constraints file.
EXTRAS ?=
CONSTRAINTS ?=
# pytest's own arguments: make test PYTEST_ARGS='-k store'
PYTEST_ARGS ?=

# Processes that run tests. More than processors take less time, for many tests wait, and hold up those that poll.
WORKERS ?= 2

# Tests of processes, sockets and disks meet machines that stand still for seconds: three of them in a run get a second
# try, and the first one's traceback is printed. `make test AGAIN=` for none. Tests of arithmetic, and those that no job is
# lost, are marked `flaky(reruns=0)`.
AGAIN ?= --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks

# The first Python that is new enough; PYTHON=/path/to/python3 overrides it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$p"; break; }; done)

# Tests that rewrite their assertions, and the many processes that they start, compile each module once.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help environment demo serve test test-service test-kernels gpu-test sanitize bench bench-service chaos lint python fuzz \
	attacks docs figures pictures containers containers-cuda containers-time perf-analyzer lock release amd amd-cupy

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

python:
	@test -n "$(PYTHON)" || { echo "gemmserve needs Python 3.11 or newer, and none is on the path." \
		"Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }

# $(call environment,extras): the virtual environment with those extras; returns at once when it is already there.
environment = @"$(PYTHON)" tools/environment.py "$(VENV)" --extras "$(1)$(if $(EXTRAS),$(comma)$(EXTRAS))" \
	$(if $(CONSTRAINTS),--constraints "$(CONSTRAINTS)")

environment: python  ## the virtual environment for tests and lint, and nothing more (EXTRAS, CONSTRAINTS, VENV)
	$(call environment,dev)

demo: python  ## start the service, run real workloads against an independent truth, draw a picture
	$(call environment,demo)
	$(RUN) examples/demo.py

serve: python  ## run the service in the foreground (ARGS='--port 9000')
	$(call environment,server$(comma)cli)
	$(VENV)/bin/gemmserve serve $(ARGS)

test: python  ## the test suite (tests that need a GPU say so when they are skipped)
	$(call environment,dev)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(AGAIN) $(PYTEST_ARGS)

test-service: python  ## the service, the client and the contract, without tests marked slow: minutes
	$(call environment,dev)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(AGAIN) -m "not slow" tests/unit/service tests/unit/client tests/unit/cli tests/contract $(PYTEST_ARGS)

test-kernels: python  ## the kernels, on CPU emulators, without tests marked slow: minutes
	$(call environment,dev)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not slow" tests/unit/kernels $(PYTEST_ARGS)

gpu-test: python  ## the tests that need a GPU, on this machine's GPU
	$(call environment,dev)
	$(RUN) -m pytest -m gpu $(PYTEST_ARGS)

sanitize: python  ## NVIDIA's compute-sanitizer over every kernel, on this machine's GPU
	$(call environment,dev)
	for tool in memcheck racecheck initcheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 9 $(RUN) tests/gpu/sanitize.py $(ARGS) || exit; done

bench: python  ## our kernels beside the vendor's, with errors (ARGS='--compute fp32')
	$(call environment,dev)
	$(VENV)/bin/gemmserve bench gemm $(ARGS)
	$(VENV)/bin/gemmserve bench accuracy

bench-service: python  ## the service beside tritonserver, LitServe, BentoML and plain servers (ARGS='--quick')
	$(call environment,dev)
	-$(RUN) -m benchmarks.service install
	$(RUN) -m benchmarks.service run $(ARGS)
	$(RUN) -m benchmarks.service report

docs: python  ## the documentation site, into build/docs; warnings are errors (ARGS='-E' reads all pages anew)
	$(call environment,docs)
	$(RUN) -m sphinx -q -W --keep-going -c docs $(ARGS) . build/docs
	@echo "build/docs/index.html"

figures: python  ## the README's tables and pictures, and the pages' figures, from the JSON under docs/benchmarks
	$(call environment,docs)
	$(RUN) -m benchmarks.figures

pictures: python  ## the guides' pictures, from what their own blocks compute (ARGS='beamforming maxwell')
	$(call environment,dev)
	$(RUN) tools/pictures.py $(ARGS)

fuzz: python  ## the parsers of what strangers send, by atheris (ARGS='--seconds 600 npy multipart')
	$(call environment,dev$(comma)fuzz)
	$(RUN) tools/fuzz.py $(ARGS)

attacks: python  ## what a well-behaved client notices while others attack the server (ARGS='--seconds 60 idle')
	$(call environment,server$(comma)cli)
	$(RUN) tools/attacks.py $(ARGS)

chaos: python  ## faults under load: processes killed, disks full, clocks set, busy neighbours (ARGS='--jobs 500')
	$(call environment,dev)
	PYTHONPATH=tests/support $(RUN) -m chaos $(ARGS)

lint: python  ## ruff, mypy and the import rules
	$(call environment,dev)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

amd: python  ## the kernels for AMD's architectures through AMD's compiler, within their budgets (ARGS='--table')
	$(call environment,dev)
	PYTHONPATH=tools $(RUN) -m amd $(ARGS)

amd-cupy: python  ## CuPy's ROCm wheel with its libraries, as far as it goes without a device (fetches 1 GB)
	$(call environment,dev)
	PYTHONPATH=tools $(RUN) -m amd.wheel

containers: python  ## build the cpu image, run the README's compose lines, kill it in every way (an engine is installed)
	$(call environment,dev)
	tools/containers/promtool.sh check config prometheus.yml
	tools/containers/promtool.sh test rules alerts_test.yml
	tools/containers/engine.sh $(abspath $(RUN)) tools/containers/check.py

perf-analyzer: python  ## NVIDIA's perf_analyzer over the inference protocol, on the CPU (fetches 15 MB once)
	$(call environment,dev)
	$(RUN) tools/containers/perf_analyzer.py

containers-cuda: python  ## build the cuda image and look inside it, without a GPU
	$(call environment,dev)
	tools/containers/engine.sh $(abspath $(RUN)) tools/containers/cuda.py

containers-time: python  ## time from `compose up` to ready, by phase, and image sizes (ARGS='--target cuda')
	$(call environment,dev)
	tools/containers/engine.sh $(abspath $(RUN)) benchmarks/containers/run.py $(ARGS)

lock: python  ## make the images' lock files again, from pyproject.toml and .ci/constraints.txt
	$(call environment,dev$(comma)lock)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) tools/lock.py

release: python  ## what a release of this commit would be: checks, two builds; ARGS='--key KEY' makes and signs it
	$(call environment,dev)
	$(RUN) tools/release.py $(ARGS)
