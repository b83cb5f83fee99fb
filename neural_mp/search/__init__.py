"""Search algorithms: choice of corrections, cost model, minimum cut."""
