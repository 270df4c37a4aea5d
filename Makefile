# make demo | chat | test | check-real | soak | lint | clean
#
# Everything runs in .venv, which is made and filled once; later runs use no network.
# TORCH=torch==2.13.0 picks the torch to install; without it pip takes the newest that fits.

PYTHON ?= python3
TORCH ?=
PY := .venv/bin/python
INSTALL := $(PY) -m pip install

.PHONY: demo chat test check-real soak lint fetch clean

demo: .venv/ready fetch
	$(PY) -m eagle_fsd compare --target demo --draft-head demo --dtype float32 \
		--max-new-tokens 128 --prompt "Why is the sky blue?"

chat: .venv/ready-chat fetch
	$(PY) -m eagle_fsd demo --target demo --draft-head demo --dtype float32

test: lint fetch
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not (slow and target)"

check-real: .venv/ready-dev fetch
	$(PY) -m pytest -m "target or slow"

soak: .venv/ready-dev fetch
	$(PY) -m tests.soak

lint: .venv/ready-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fetch: .venv/ready
	$(PY) -m eagle_fsd fetch

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(if $(TORCH),$(INSTALL) "$(TORCH)")
	$(INSTALL) -r requirements.txt
	touch $@

.venv/ready-chat: .venv/ready pyproject.toml
	$(INSTALL) -e ".[demo]"
	touch $@

.venv/ready-dev: .venv/ready pyproject.toml
	$(INSTALL) -e ".[dev,train,demo,judge,lm-eval]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
