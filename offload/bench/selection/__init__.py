"""`offload bench selection`: what policies keep, on real text."""
