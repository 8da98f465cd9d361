"""Measures the agent against its budgets and its peers: `python -m benchmarks`, or `make bench`.

Each benchmark is a module with a function `measure`, run in a process of its own. None of them is a test: what they
print depends on the machine and on what else it does.
"""
