"""The face: what users drive, from Python and from the command line."""
