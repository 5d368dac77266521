"""`offload bench attention`: one attention operator against memory bandwidth."""
