"""`offload bench latency`: one core against all, per policy, on made keys."""
