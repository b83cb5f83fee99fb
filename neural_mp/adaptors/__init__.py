"""One package per framework, all behind one contract (`neural_mp.adaptors.contract`)."""
