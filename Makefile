# make demo      from a fresh clone to text: environment, default model, bundle, comparison
# make engines   MODEL=... [DRAFTS="... ..."] [K=4] [NODES=16] [BACKEND=ort|ort-cuda|tensorrt|tensorrt-rtx]
#                [PRECISION=fp32|fp16|int8|int8-weights|int4-weights] [GPU="sm89 ..."] [CAPACITY=...] [SLOTS=...] [OUT=build/bundles/NAME]
# make test      checks and tests
# make check     ruff, mypy
# make gpu       on a machine with a GPU: the tests that need one, and how long the accept step takes
# make lossless  every proposer equal to plain decoding on the default model (about half an hour)
# make triton    [BUNDLE=...]  the tests of Triton Inference Server with a real model's bundle (default: the demo's)
# make peers     specrun beside other libraries on this machine's CPU: same model, prompts, threads (benchmarks/README.md)
# make clean     remove everything that was made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

MODEL ?= smollm2-135m
DRAFTS ?=
K ?= 4
NODES ?= 16
BACKEND ?= ort
PRECISION ?=
CAPACITY ?=
SLOTS ?=
GPU ?=
OUT ?= build/bundles/$(notdir $(patsubst %/,%,$(MODEL)))

DEMO_BUNDLE := build/bundles/smollm2-135m

.PHONY: demo engines test check gpu lossless triton peers clean

demo: $(VENV)/.export
	$(BIN)/specrun build smollm2-135m --out $(DEMO_BUNDLE) --draft drafts/smollm2-135m-eagle3
	$(BIN)/specrun generate $(DEMO_BUNDLE) --chat --prompt "$$(cat runner/prompts/demo.txt)" --compare

engines: $(VENV)/.export $(if $(GPU),$(VENV)/.gpu)
	$(BIN)/specrun build "$(MODEL)" --out "$(OUT)" --k $(K) --nodes $(NODES) --backend $(BACKEND) \
		$(if $(PRECISION),--precision $(PRECISION)) $(if $(CAPACITY),--capacity $(CAPACITY)) $(if $(SLOTS),--slots $(SLOTS)) $(foreach gpu,$(GPU),--gpu $(gpu)) $(foreach draft,$(DRAFTS),--draft "$(draft)")

# A worker per core, each with whole files, so that the models that a file shares are built once. PyTorch's threads would
# only wait for each other: the models are tiny. A worker that crashes ends the run; a new one would leave it hanging.
test: check $(VENV)/triton/.created
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --max-worker-restart 0 --dist loadfile \
		-m "not gpu and not model"

# mypy wants to see the subpackages below a folder called specrun; there is none (pyproject.toml maps them).
check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build && ln -sfn .. build/specrun
	MYPYPATH=build $(BIN)/mypy -p specrun.distill -p specrun.export -p specrun.calibration -p specrun.engines -p specrun.runner
	MYPYPATH=build $(BIN)/mypy tests
	MYPYPATH=build $(BIN)/mypy benchmarks

gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m gpu
	$(BIN)/python -m tests.kernels.time_accept

# One draft of each kind; as a draft model the target itself, which fits no budget but tests the proposer.
LOSSLESS_DRAFTS := $(wildcard drafts/smollm2-135m-*) early-exit:15 smollm2-135m

lossless: $(VENV)/.dev
	$(BIN)/specrun build smollm2-135m --out $(DEMO_BUNDLE)-all $(foreach draft,$(LOSSLESS_DRAFTS),--draft $(draft))
	$(BIN)/python -m pytest -q -s -m model

BUNDLE ?= $(DEMO_BUNDLE)

triton: $(VENV)/.dev $(VENV)/triton/.created
	SPECRUN_BUNDLE="$(abspath $(BUNDLE))" $(BIN)/python -m pytest -q tests/serving/test_triton.py

peers: $(VENV)/.dev
	$(BIN)/specrun build smollm2-135m --out $(DEMO_BUNDLE) --draft drafts/smollm2-135m-eagle3
	$(BIN)/specrun build smollm2-135m --precision int8 --out $(DEMO_BUNDLE)-int8 --draft drafts/smollm2-135m-eagle3
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf build $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.export: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable ".[export]"
	touch $@

$(VENV)/.gpu: pyproject.toml $(VENV)/.export
	$(BIN)/python -m pip install --quiet --editable ".[export,gpu]"
	touch $@

# The Triton server of the tests: its Python backend wants another NumPy.
$(VENV)/triton/.created: pyproject.toml $(VENV)/.created
	$(PYTHON) -m venv $(VENV)/triton
	$(VENV)/triton/bin/python -m pip install --quiet --editable ".[serve,grammar,triton-test]"
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.export
	$(BIN)/python -m pip install --quiet --editable ".[export,dev]"
	touch $@
