.PHONY: setup demo check test cluster chaos fuzz bench clean

BIN := .venv/bin

setup: .venv/ready  ## make .venv with the pinned versions

.venv/ready: pyproject.toml constraints.txt tools/setup.sh
	./tools/setup.sh
	@touch $@

.venv/peers: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

demo: setup  ## the first minute: synthetic volumes, training, evaluation
	$(BIN)/voxscale demo

check: setup  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## all checks and all tests but the slow ones of `cluster`
	$(BIN)/python -m pytest -m 'not cluster'

cluster: .venv/peers  ## the full matrix on a real SLURM (installed and started for it, needs root) and on real Ray clusters
	$(BIN)/python -m pytest -m 'cluster or slurm or ray'

chaos: setup  ## kills, lost nodes, full disks and damage by the hundred, on real clusters too (needs root): docs/reliability.md
	cd tests && ../$(BIN)/python -m chaos

fuzz: setup  ## 10,000 malformed images, labels, tables, configs and TFRecords
	cd tests && ../$(BIN)/python -m fuzz

BENCH_DATA ?= data/brats-like

bench: .venv/peers  ## side by side with peers: patches, whole volumes, a training job; quality; a million cases; a SLURM job; searches. Not part of test.
	$(BIN)/python bench/patches.py --data $(BENCH_DATA) --patch 128 128 128 --threads 1
	$(BIN)/python bench/stream.py --cases 1000000
	$(BIN)/python bench/windows.py --threads 1
	$(BIN)/python bench/train_job.py
	$(BIN)/python bench/quality.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/search.py
	$(BIN)/python bench/search.py --asha
	$(BIN)/python bench/distmis.py

clean:  ## remove .venv and caches; runs and data stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
