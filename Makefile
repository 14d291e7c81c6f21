# Everything that a fresh machine needs: Python 3.11 or newer, make, and PyPI.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# setuptools warns about every editable install
PIP    := PYTHONWARNINGS=ignore $(BIN)/python -m pip install
MODELS ?= models
export PYGGML_TEST_MODELS := $(abspath $(MODELS))

SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3  := $(MODELS)/gemma-3-270m-it-Q4_K_M.gguf
PROMPT  ?= Why is the sky blue? Answer in two sentences.

.PHONY: demo test test-all check bench format clean

demo: $(VENV)/run.ok $(SMOLLM2)  ## a small real model answers a question
	$(BIN)/pyllama-cli -m $(SMOLLM2) -cnv -st -p "$(PROMPT)" --temp 0 -n 120

# a worker that crashed ends the run: pytest-xdist may wait for ever with one that it restarted
test: $(VENV)/dev.ok $(SMOLLM2) $(GEMMA3)  ## the tests, without the slow ones
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --max-worker-restart 0 -m "not slow"

test-all: $(VENV)/dev.ok $(SMOLLM2) $(GEMMA3)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --max-worker-restart 0 --hypothesis-profile=default

check: $(VENV)/dev.ok  ## format, lint, types, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/sizes.py

bench: $(VENV)/bench.ok $(SMOLLM2) $(GEMMA3)  ## beside llama.cpp, on the same files
	$(BIN)/pyllama-bench -m $(SMOLLM2),$(GEMMA3) -p 512 -n 64 -t 1,2 --vs-llama-cpp

format: $(VENV)/dev.ok
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/base.ok:
	$(PYTHON) -m venv $(VENV)
	$(PIP) -q --upgrade "pip>=25.1"
	touch $@

$(VENV)/run.ok: pyproject.toml setup.py | $(VENV)/base.ok
	$(PIP) -q -e .
	touch $@

$(VENV)/dev.ok: pyproject.toml setup.py | $(VENV)/run.ok
	$(PIP) -q -e . --group dev
	touch $@

# llama-cpp-python compiles llama.cpp for this machine: about ten minutes, once
$(VENV)/bench.ok: pyproject.toml | $(VENV)/run.ok
	$(PIP) -q -e . --group bench
	touch $@

$(MODELS)/%.gguf: | $(VENV)/base.ok
	$(BIN)/python tests/fetch_models.py $@
