"""A controller runtime for Kubernetes: client, caches, controllers, webhooks, leader election and status updates.

It contains nothing specific to accelerators. `docs/kube.md` explains how to write a controller.
"""
