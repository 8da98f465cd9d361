"""Dynamic resource allocation (DRA) in the agent. Not imported while all units belong to device plugins."""
