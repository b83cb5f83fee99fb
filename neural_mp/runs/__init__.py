"""Storage of tuning runs: history, lease, record, report, measurement cache."""
