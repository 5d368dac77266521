"""`offload bench serve`: many requests at once, to our engine and to others."""
