"""The fleet page: screens of a cluster as HTML, their live updates, and access control."""
