"""A controller runtime: what a program needs that makes a Kubernetes cluster be what objects in it ask for.

It knows no accelerator and nothing else of this package. `docs/kube.md` explains how to write a controller.
"""
