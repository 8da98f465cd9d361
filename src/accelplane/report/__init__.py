"""What an agent reports of its node: the documents of `/api/v1/inventory` and `/api/v1/readings`.

The formats are a contract with other programs: version 1, with the limits of the types. The agent encodes these types
(`pages.inventory`, `pages.current_values`); the fleet page and the commands decode them (`report.decoding`). A new
field is added here, and filled by the agent.
"""
