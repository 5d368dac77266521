"""`offload eval`: what a policy loses on tasks with a right answer, against full attention."""
