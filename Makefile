# Every target makes or refreshes its own environment first; see tools/environments.py. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
ENVIRONMENT := $(PYTHON) tools/environments.py
# Two processes, a file in one of them: compiles of absent hardware wait for their workers much of the time.
PYTEST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo picture docs quick record-answers test test-all test-adapters core lint format-check format types mutants check-wheel gpu-check bench bench-accumulation bench-adapters bench-analytic bench-chunks bench-estimator bench-hook bench-hosts bench-million bench-remat bench-lowering bench-options bench-padding bench-peers bench-policies bench-viewer bench-examples bench-plan bench-plan-time bench-recovery bench-scale bench-simulator bench-stale bench-state bench-vmaps clean gallery newest python

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-14s %s\n", $$1, $$2 }'

demo: python ## train a small model with presets, watch its memory, show it in TensorBoard
	@$(ENVIRONMENT) run project,demo python examples/demo.py $(ARGS)

quick: python ## what needs no process of its own, no browser and no compiler of absent hardware, and takes seconds a file
	@$(ENVIRONMENT) run project,test $(PYTEST) -m quick $(ARGS)

test: python ## everything that can be proved without an accelerator
	@$(ENVIRONMENT) run project,test,docs,targets $(PYTEST) $(ARGS)

test-all: python ## the same on every supported Python found, both JAX lines
	@$(ENVIRONMENT) each project,test,docs,targets $(PYTEST) $(ARGS)

core: python ## what can differ on the second JAX line, there
	@$(ENVIRONMENT) other project,test $(PYTEST) -m "core and not targets and not browser" $(ARGS)

record-answers: python ## ask absent hardware's compilers for the answers that tests plan by, to tests/answers/
	@$(ENVIRONMENT) run project,test,targets env JAXMEM_RECORD_ANSWERS=1 $(PYTEST) -m recorded $(ARGS)

test-adapters: python ## train with the real Flax, Equinox, optax, Orbax, Keras, clu, Grain, Tunix, Kauldron and Levanter, the monitor in its place; installs them, and takes a quarter of an hour
	@$(ENVIRONMENT) apart project,test python -m benchmarks.frameworks $(ARGS)

gallery: python ## plan public training programs as they are, paste the printed lines and train them; installs them, takes hours
	@$(ENVIRONMENT) run project,test python -m benchmarks.gallery $(ARGS)

bench-viewer: python ## the ten largest buffers at the peak of public programs, by XProf's memory viewer and here; minutes
	@$(ENVIRONMENT) run project,test python -m benchmarks.gallery.memory_viewer $(ARGS)

bench-policies: python ## MaxText's own remat policies and one plan of the same decoder, for an H100; a quarter of an hour
	@$(ENVIRONMENT) run project,test python -m benchmarks.gallery.remat_policies $(ARGS)

bench-estimator: python ## MaxText's memory estimator and a plan, asked for a policy that fits a TPU v5e; minutes
	@$(ENVIRONMENT) run project,test python -m benchmarks.gallery.estimator $(ARGS)

bench-hosts: python ## MaxText in two processes on the CPU: an event on one, and a failure, on the pages of both; minutes
	@$(ENVIRONMENT) run project,test python -m benchmarks.gallery.two_hosts $(ARGS)

newest: python ## the marked core with everything without upper bounds, pre-releases too: what the next JAX line will break
	@$(ENVIRONMENT) newest project,test $(PYTEST) -m "core and not targets and not browser" $(ARGS)

lint: python ## ruff check
	@$(ENVIRONMENT) run project,test,lint ruff check .

format-check: python ## ruff format --check
	@$(ENVIRONMENT) run project,test,lint ruff format --check .

format: python ## rewrite the files as format-check wants them
	@$(ENVIRONMENT) run project,test,lint ruff format .

types: python ## pyright, strict on the package
	@$(ENVIRONMENT) run project,test,lint pyright

mutants: python ## delete the lines that keep the promises, one by one; each must turn a test red
	@$(ENVIRONMENT) run project,test,targets python tools/mutants.py $(ARGS)

check-wheel: python ## the wheel in clean environments: every Python found, every extra, from the sdist too; downloads, many minutes
	@$(ENVIRONMENT) run project,test python -m tools.check_wheel $(ARGS)

gpu-check: python ## what only an NVIDIA GPU can answer, on this machine's own Python and JAX (under 8 minutes)
	@$(PYTHON) tools/gpu_check.py $(ARGS)

bench: bench-accumulation bench-analytic bench-hook bench-lowering bench-padding bench-peers bench-recovery bench-remat bench-simulator ## figures that take minutes, to results/; not bench-adapters, bench-examples, bench-million, bench-scale, bench-plan and bench-plan-time

bench-hook: python ## the cost of the monitor's hook per step, beside other loggers and stormlog
	@$(ENVIRONMENT) run project,test,compared python -m benchmarks.hook_cost $(ARGS)

bench-adapters: python ## the monitor writes into the real clu, Flax, metrax, tensorboardX and Weights & Biases; installs TensorFlow
	@$(ENVIRONMENT) run project,test,adapters $(PYTEST) -m adapters tests/test_adapters_wandb.py
	@$(ENVIRONMENT) run project,test,adapters python -m benchmarks.adapters $(ARGS)

bench-peers: python ## texts of failures, read by stormlog and by this library; seconds
	@$(ENVIRONMENT) run project,test,compared python -m benchmarks.peers $(ARGS)

bench-million: python ## a million steps under the monitor: memory, files and lost stamps; minutes
	@$(ENVIRONMENT) run project,test python -m benchmarks.million_steps $(ARGS)

bench-accumulation: python ## bytes of a step over microbatches, and how wrong a plain mean over them can be
	@$(ENVIRONMENT) run project,test python -m benchmarks.accumulation $(ARGS)

bench-remat: python ## bytes and FLOPs of the cut against remat written by hand, on CPU, H100 and v5e
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.remat_by_hand $(ARGS)

bench-chunks: python ## bytes and FLOPs of a vocabulary's head in chunks, by the library and by hand, on CPU, H100 and v5e
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.chunked_head $(ARGS)

bench-state: python ## what a step's peak falls by with the optimizer's state on the host, on H100, v5e and CPU
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.state_offload $(ARGS)

bench-vmaps: python ## the fewest chunks that fit of five programs that map over samples by jax.vmap, on the CPU
	@$(ENVIRONMENT) run project,test python -m benchmarks.vmapped_programs $(ARGS)

bench-lowering: python ## what cutting a loss costs at start-up
	@$(ENVIRONMENT) run project,test python -m benchmarks.lowering $(ARGS)

bench-options: python ## what options of XLA's compilers move on absent hardware and the CPU
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.compiler_options $(ARGS)

bench-padding: python ## what arrays take on TPUs and GPUs besides their own bytes
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.padding $(ARGS)

bench-analytic: python ## what a plan costs before anything is compiled, at 10,000 equations
	@$(ENVIRONMENT) run project,test python -m benchmarks.analytic $(ARGS)

bench-plan: python ## plans against remat written by hand, on H100, v5e and CPU; hours, goes on where it stopped
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.plan_bench $(ARGS)
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.plan_table

bench-plan-time: python ## processor seconds of plans of public models against an earlier commit's, for the CPU; half an hour
	@$(ENVIRONMENT) run project,test python -m benchmarks.plan_time $(ARGS)

bench-examples: python ## plans of two examples, one of them for a pod, for an H100; the figures of docs/plan.md
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.plan_examples $(ARGS)

bench-scale: python ## plans of a GPT-3-sized step for pods of 64 and 1,024 devices
	@$(ENVIRONMENT) run project,test,targets python -m benchmarks.plan_scale $(ARGS)

bench-recovery: python ## what jm.Recovery costs a run in which nothing fails: waits for steps, copies of the state
	@$(ENVIRONMENT) run project,test python -m benchmarks.recovery_cost $(ARGS)

bench-simulator: python ## allocations a second of the simulated allocators, and what recording a trace costs
	@$(ENVIRONMENT) run project,test python -m benchmarks.simulator $(ARGS)

picture: python ## draw the pictures of docs/plan.md, remat.md, simulate.md, allocation.md and gpu_and_tpu.md from committed figures, a trace and the simulated pool
	@$(ENVIRONMENT) run project,test python -m benchmarks.plan_picture $(ARGS)
	@$(ENVIRONMENT) run project,test python -m benchmarks.cuts_picture $(ARGS)
	@$(ENVIRONMENT) run project,test python -m benchmarks.simulator_picture $(ARGS)
	@$(ENVIRONMENT) run project,test python -m benchmarks.allocation_picture $(ARGS)
	@$(ENVIRONMENT) run project,test python -m benchmarks.padding_picture $(ARGS)

docs: python ## the documentation as a site in build/site; a broken link, name or section fails
	@$(ENVIRONMENT) run project,docs env NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet $(ARGS)
	@echo "build/site/index.html"

bench-stale: python ## which result files were written by other sources than are here
	@$(PYTHON) -m benchmarks.sources

clean: ## remove environments, caches and runs
	rm -rf .venv .venv-3.* runs build dist .pytest_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Install Python 3.11, 3.12 or 3.13, for example: apt-get install python3 python3-venv"; exit 1; }
