"""Real servers that tests start, break and stop."""
