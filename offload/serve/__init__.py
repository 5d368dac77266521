"""An engine behind OpenAI's HTTP interface; the extra `serve` has what it needs."""
