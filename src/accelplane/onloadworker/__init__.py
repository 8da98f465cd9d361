"""The Onload worker: makes the host's kernel start the control plane server in the container of this process."""
