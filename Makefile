# Everything on a fresh machine with Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Installs once per change of the files that say what to install.
STAMP := $(VENV)/.installed
PEER_STAMP := $(VENV)/.installed-peer
TEST_ARGS ?=

.PHONY: demo test test-peer check format bench-cpu bench-pipeline wheel clean

demo: $(STAMP)
	$(BIN)/shardline demo

test: $(STAMP)
	$(BIN)/pytest -m "not gpu and not peer" -n auto --dist loadfile $(TEST_ARGS)

test-peer: $(PEER_STAMP)
	$(BIN)/pytest -m peer $(TEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-cpu: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt llama-cpp-python
	$(BIN)/python -m benchmarks.cpu

bench-pipeline: $(STAMP)
	$(BIN)/python -m benchmarks.pipeline

wheel: $(STAMP)
	$(BIN)/python -m build

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"shardline needs Python 3.11 or newer, and {sys.executable} is {v}. Try: make PYTHON=python3.11 <target>") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(PEER_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peer]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
