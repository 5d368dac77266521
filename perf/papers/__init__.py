"""The papers' own claims, measured: ours beside theirs."""
