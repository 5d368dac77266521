"""`offload bench decode`: tokens per second by context and policy, beside other engines."""
