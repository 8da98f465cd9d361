"""What the API server asks about pods of accelerators: decisions, each a function of a pod."""
