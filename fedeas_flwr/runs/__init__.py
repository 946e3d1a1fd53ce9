"""Write what a run leaves on disk, and read it back.

Other rooms use `RunDirectory`, the checkpoint's `Arrays`, `Checkpoint`, `StrategyState` and `to_numpy`, the functions
of `listing.py` and `metrics.py`, `event_log`, `is_run` and `remove_files`.
"""
