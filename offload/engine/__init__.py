"""Many requests to one model: `Engine`, and `AsyncEngine` for servers."""
