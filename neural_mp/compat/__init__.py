"""For people who come from another tool."""
