"""Browser view of a workspace: all runs, comparisons, running runs, and replays of edited plans."""
