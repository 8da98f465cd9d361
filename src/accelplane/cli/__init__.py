"""Commands. The node's are kept light: each imports what it runs and no more."""
