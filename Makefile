# Two commands do everything: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
RUNS ?= runs
WORKERS ?= 2
# Inside .venv the standard library of the interpreter is the demo's corpus; nothing else is downloaded than packages.

.PHONY: install demo test test-all test-gpu lint bench clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "TriScale needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 demo"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The demo needs the core and the report; tests and benchmarks need everything.
$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing torch (the build your pip index offers) and TriScale into $(VENV)"
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt torch setuptools wheel
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[report]'
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__, "- CUDA", torch.version.cuda or "not in this build")'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.demo-installed
	@echo "installing what the tests and benchmarks need"
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,peers]'
	@touch $@

install: $(VENV)/.dev-installed

demo: $(VENV)/.demo-installed
	$(BIN)/triscale ladder run demo --runs $(RUNS)/demo
	$(BIN)/triscale generate $(RUNS)/demo --prompt 'def read_file(path):' --tokens 80

test: $(VENV)/.dev-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -m 'not slow and not gpu'

test-all: $(VENV)/.dev-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -m 'not gpu'

test-gpu: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev-installed
	@for script in benchmarks/*.py; do case $$script in */_*) ;; *) echo "== $$script"; $(BIN)/python $$script || exit 1;; esac; done

clean:
	rm -rf $(VENV) build dist src/*.egg-info
