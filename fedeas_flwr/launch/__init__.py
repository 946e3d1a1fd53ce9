"""Start runs and sweeps, show their progress, and stop their processes."""
