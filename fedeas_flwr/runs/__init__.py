"""Read and write run directories: configs, round records, checkpoints, metrics and status."""
