"""Mixed-precision training: dtype policies, loss scaling, the graph-rewrite switch."""
