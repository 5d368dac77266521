"""`offload bench quality`: what policies select, and lose, on real text."""
