"""The pages of an agent: what they show is read when a client requests it, and at no other time."""
