"""A real Kubernetes on one computer for tests and for people: genuine programs, simulated hardware."""
