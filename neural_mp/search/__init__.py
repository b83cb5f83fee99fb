"""Pure search algorithms: sensitivity aggregation, cost model, minimum-cut assignment."""
