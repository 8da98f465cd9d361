"""Commands. To save memory, each node command imports only the modules that it runs."""
