"""Read and write run directories: configs, round records, checkpoints, metrics and status.

Other packages use `RunDirectory`, `Checkpoint` and `StrategyState`, `ClassScores`, the functions of `listing.py` and
`metrics.py`, `is_run` and `remove_files`.
"""
