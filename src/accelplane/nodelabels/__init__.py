"""Node feature discovery: labels and extended resources of a node, by the rules of node-feature-discovery (NFD).

`discover` reads the host and `evaluate` applies the rules; both are plain functions. `node_reconciler` applies the
result to the Node at the API server.
"""

from accelplane.nodelabels.discovery import Features, Function, discover
from accelplane.nodelabels.rules import RULES, Rule, RuleOutput, evaluate

__all__ = ["RULES", "Features", "Function", "Rule", "RuleOutput", "discover", "evaluate"]
