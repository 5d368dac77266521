"""`offload bench decode`: tokens per second by context and policy, compared with other engines."""
