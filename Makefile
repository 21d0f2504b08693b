# Everything runs in .venv, made by scripts/setup; stamp files there keep a second run quick.
# PYTHON=python3.12 make test    uses another interpreter for a new .venv.

VENV := .venv
BIN := $(VENV)/bin
DEPENDENCIES := pyproject.toml constraints.txt scripts/setup
BENCHMARKS := $(sort $(wildcard benchmarks/bench_*.py))

.PHONY: demo test test-all lint docs bench scoreboard check clean

demo: $(VENV)/.stamp-core
	$(BIN)/steptime plan gpt3_1T --cluster dgx-b200 --gpus 2048 --global-batch 4096

test: $(VENV)/.stamp-test
	scripts/test

test-all: $(VENV)/.stamp-test
	scripts/test --all

lint: $(VENV)/.stamp-lint
	scripts/lint

docs: $(VENV)/.stamp-docs
	scripts/docs

bench: $(VENV)/.stamp-test
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file; done

scoreboard: $(VENV)/.stamp-test
	scripts/scoreboard

check: lint test

clean:
	rm -rf docs/_build docs/generated build dist

$(VENV)/.stamp-%: $(DEPENDENCIES)
	scripts/setup $*
