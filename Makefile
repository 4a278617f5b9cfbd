# Commands for a checkout; each sets up what it needs. `make test` and `make demo` are the two to start with.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# Worker processes, and further arguments, for pytest.
JOBS ?= 2
PYTEST_ARGS ?=

# One thread a worker: more threads than cores make tiny models slower. No test needs the public hub; those that push
# or pull start a local server and set their own environment.
TEST_ENV = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: test test-oldest test-gpu demo lint setup common-tests-source clean

test: setup common-tests-source
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n $(JOBS) -m "not gpu" $(PYTEST_ARGS)

test-oldest:
	@$(MAKE) --no-print-directory test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# Uses the python given, not a virtual environment: a GPU machine usually has its own build of torch.
test-gpu:
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest tests/test_gpu.py tests/test_gpu_kernels.py tests/test_gpu_long_prompts.py tests/test_kernels.py \
		tests/test_kernels_backward.py tests/test_float8.py tests/test_cache_forks.py tests/test_baselines.py $(PYTEST_ARGS)

demo: setup
	$(VENV)/bin/python scripts/generate.py

# mypy needs the modules under the package's name, whatever the checkout is called.
lint: setup
	$(VENV)/bin/ruff check .
	mkdir -p build/lint && ln -sfn $(CURDIR) build/lint/recsa_qwen3
	$(VENV)/bin/mypy

# transformers' own common tests, which come from its source distribution of the installed version.
common-tests-source: setup
	@if [ -f tests/common/fetch.py ]; then $(VENV)/bin/python tests/common/fetch.py; fi

setup: $(VENV)/.ready

# torch goes first and pinned, so that nothing else chooses its version.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c $(CONSTRAINTS) torch
	$(VENV)/bin/pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-oldest build *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
