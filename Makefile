# make demo: the main job, checked. make test: lint, types and the tests, on both Tritons. Nothing need be installed.
# Another Python, torch or Triton: make test PYTHON=python3.12 TORCH='torch==2.12.0'. A torch that is in .venv already stays.
PYTHON ?= python3
TORCH ?= torch==2.13.0
FLOOR ?= triton==3.6.0
NEWEST ?= triton==3.9.0
VENV ?= .venv
VENV_NEWEST ?= .venv-newest
JOBS ?= 2
PYTEST_ARGS ?=
# Neighbours stay in one process, which keeps what it has compiled; whoever is done first takes from the others.
SPREAD := -n $(JOBS) --dist worksteal
# Without a device the kernels run in Triton's interpreter, which under 3.6 needs numpy below 2.4.
NUMPY := 'numpy<2.4'

.PHONY: demo test test-floor test-newest test-slow lint clean

demo: $(VENV)/.ready
	$(VENV)/bin/python examples/demo.py

test: lint test-floor test-newest

test-floor: $(VENV)/.ready
	$(VENV)/bin/python -m pytest $(SPREAD) $(PYTEST_ARGS)

# What a Triton version can change: the device code, and what every row compiles to. Long ones first.
NEWEST_TESTS := $(addprefix tests/test_,sm_90.py sm_90_backward.py sm_100.py sm_100_price.py gfx1151.py gfx1151_price.py compiling.py compiling_features.py tritons.py gluon_sim_clusters.py softmax.py products.py memory.py scores.py sequences.py)
test-newest: $(VENV_NEWEST)/.ready
	$(VENV_NEWEST)/bin/python -m pytest $(SPREAD) $(NEWEST_TESTS) $(PYTEST_ARGS)

test-slow: $(VENV)/.ready $(VENV_NEWEST)/.ready
	$(VENV)/bin/python -m pytest $(SPREAD) --slow $(PYTEST_ARGS)
	$(VENV_NEWEST)/bin/python -m pytest $(SPREAD) --slow $(PYTEST_ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# torch first and by itself: lazymax depends on it without a version, so this choice stands. A torch built for a GPU brings
# the Triton that fits it; only without one is Triton installed. No byte code ahead: most of torch is never imported.
comma := ,
define install
	test -d $(1) || $(PYTHON) -m venv $(1)
	$(1)/bin/python -c "import torch" 2>/dev/null || $(1)/bin/pip install -q --no-compile $(TORCH)
	$(1)/bin/python -c "import triton" 2>/dev/null || $(1)/bin/pip install -q --no-compile $(2)
	$(1)/bin/pip install -q --no-compile -e '.[test,bench,lint$(3)]' $(NUMPY)
	touch $(1)/.ready
endef

$(VENV)/.ready: pyproject.toml
	$(call install,$(VENV),$(FLOOR),$(comma)consumers)

$(VENV_NEWEST)/.ready: pyproject.toml
	$(call install,$(VENV_NEWEST),$(NEWEST))

clean:
	rm -rf $(VENV) $(VENV_NEWEST)
