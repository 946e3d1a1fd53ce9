"""Start runs and sweeps, show their progress, and stop their processes.

Other packages use `launch`, `prepare`, `check_runs`, `evaluate_run`, `ensure_digits_generator`, the resources of a run
(`ray_resources`, `clients_at_once`), the `show_*` functions of `progress.py`, the sweeps (`sweep.py`, `run_sweep`), and
the ports and environment of `superlink.py`.
"""
