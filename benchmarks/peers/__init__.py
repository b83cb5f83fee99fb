"""Other tools, some of which run in environments of their own."""
