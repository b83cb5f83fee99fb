"""One package per framework, each behind the same contract (`neural_mp.adaptors.contract`)."""
