# Everything a newcomer needs: `make demo` and `make test` set themselves up with python3.11+ alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test processes thorough slow check docs evaluation resolve mutants bench wan studies clean

demo: $(READY)
	$(BIN)/atoll demo

# One thread a process, or they would fight over two cores; three processes, for many tests wait for others.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m 'not slow and not processes and not thorough' --cov=atoll.core --cov=atoll.outer --cov=atoll.link.local --cov-report= -q
	$(BIN)/python -m coverage report --include='src/atoll/core/*,src/atoll/outer/*,src/atoll/link/local.py' --show-missing --skip-covered --fail-under=100

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/limits.py

# The pages of docs/ and the API reference, as a site in build/site; a broken link or an unknown name is an error.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# `atoll eval` against lm-evaluation-harness, which no other target needs; of its dependencies pip builds three.
evaluation: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[eval]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/unit/test_evaluation.py

# Workers, trainers and savers as processes of their own, killed and interrupted: they wait more than they compute.
processes: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m 'processes and not slow' -q

# All cases and examples of which `make test` takes some, and the kernels in Triton's interpreter.
thorough: $(READY)
	ATOLL_TESTS=thorough OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m 'thorough and not slow' -q
	ATOLL_TESTS=thorough OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m 'not slow' -q tests/property

# That the set-up resolves from the public index alone, for every Python and system it is for; downloads no wheels.
resolve: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/python tools/resolve.py

# What takes minutes: kill -9 at twenty moments, and the like.
slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow -q

# Seeds known bugs one at a time; each must turn a test red.
mutants: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[eval]'
	$(BIN)/python tests/mutants

bench: $(READY)
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/trainer.py

# Slow lines between network namespaces (needs root and iproute2; torchft's rows: pip install -e .[bench]): over an hour,
# and for nothing if the machine does anything else meanwhile.
wan: $(READY)
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/wan.py

# The constraints pin what CI runs, but for what torch pins itself (triton, CUDA): `make resolve` checks that all fit.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("atoll needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# The papers' statements at small scale, each with its figure; under an hour on two cores.
studies: $(READY)
	$(BIN)/python benchmarks/studies.py

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache .coverage
