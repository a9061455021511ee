# Two commands for a fresh machine. The README has the same lines for those who have an environment of their own.
#
#   make quickstart    train a small GPT on two CPU ranks
#   make test          run the tests
#
# Both make the virtual environment VENV ready first; if it is, that costs nothing. PYTHON picks the interpreter.
VENV ?= .venv
PYTHON ?= python3

# Ranks and programs are processes that would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test environment

quickstart: environment
	$(VENV)/bin/python -m recipes.gpt fit --config recipes/gpt/configs/quickstart.yaml

test: environment
	$(VENV)/bin/python -m pytest -n 2

environment:
	@PYTHON="$(PYTHON)" bash .ci/environment "$(VENV)"
