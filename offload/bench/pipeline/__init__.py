"""`offload bench pipeline`: what of a decode step overlaps, waits or is exposed."""
