"""The registry: folds a job's log, speaks the outcomes, notices lost agents."""
