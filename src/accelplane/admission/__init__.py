"""Admission decisions for pods that request accelerators. Each decision is a function of a pod."""
