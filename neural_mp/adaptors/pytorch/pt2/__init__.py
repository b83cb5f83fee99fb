"""Safe reader of `.pt2` archives: no unpickling, no source text from the file."""
