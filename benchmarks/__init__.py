"""Benchmarks of agent, webhooks and operators: `python -m benchmarks`, or `make bench`.

Each benchmark is a module with a function `measure` and runs in a separate process. Benchmarks are not tests: the
figures depend on the machine and its load.
"""
