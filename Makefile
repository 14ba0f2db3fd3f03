# Every target sets up what it needs: Python 3.11 or newer and make are enough.

NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
    $(shell $(p) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $(p))))
BIN = .venv/bin
# torch is the one package that pip finds better: its CPU build, where there is one.
TORCH = torch==2.13.0

.PHONY: setup demo test test-peers test-slow lint lock

setup: .venv/.ready

.venv/.ready: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@

.venv/.peers: .venv/.ready requirements-bench.txt
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements-bench.txt
	@touch $@

# Three clips, into renders/demo.
demo: .venv/.ready
	$(BIN)/tilereel render configs/manifests/demo.yaml

test: lint
	$(BIN)/python -m pytest -m "not slow and not peers and not tpu_compile" $(ARGS)

test-peers: .venv/.peers
	$(BIN)/python -m pytest -m "(peers or tpu_compile) and not slow" $(ARGS)

test-slow: .venv/.peers
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: .venv/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# Writes the lock anew from pyproject.toml.
lock: .venv/.ready
	$(BIN)/uv pip compile pyproject.toml --extra test --no-header --no-annotate --upgrade --output-file requirements.txt
