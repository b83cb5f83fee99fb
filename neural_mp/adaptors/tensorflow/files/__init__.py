"""Files of graphs: reading, checks of their contents, and storage."""
