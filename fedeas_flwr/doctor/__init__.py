"""Check whether this machine, or a deployment, is ready for a run."""
