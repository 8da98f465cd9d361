"""What a node is for, told by labels: the rules of node-feature-discovery, judged without it.

`look` reads the host, `judged` applies the table of rules; both are plain functions. `upkeep` keeps a Node object at
the API server as it should be.
"""

from accelplane.features.found import Features, Function, look
from accelplane.features.rules import RULES, Outcome, Rule, judged

__all__ = ["RULES", "Features", "Function", "Outcome", "Rule", "judged", "look"]
