"""`offload bench budget`: how many tokens heads get, how many they need, and what that costs."""
