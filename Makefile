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

check: setup  ## lint, format, types, layers, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: check  ## all checks and all tests but the slow ones of `cluster`
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m 'not cluster and not alone'
	$(BIN)/python -m pytest -m 'alone and not cluster'

cluster: .venv/peers  ## the full matrix on a real SLURM (installed and started for it, needs root) and on real Ray clusters
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m 'cluster or slurm or ray'

chaos: setup  ## kills, lost nodes, full disks and damage by the hundred, on real clusters too (needs root): docs/reliability.md
	cd tests && ../$(BIN)/python -m chaos

fuzz: setup  ## 10,000 malformed images, labels, tables, configs and TFRecords
	cd tests && ../$(BIN)/python -m fuzz

bench: .venv/peers  ## ratios to peers, of a step, patches, start-up, a job; with FULL=1 also windows, quality, SLURM, searches. Not part of test.
	$(BIN)/python bench/all.py $(if $(FULL),--full)

clean:  ## remove .venv and caches; runs and data stay
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
