"""Start one run or many, follow them, and end them.

Other rooms use `launch`, `prepare`, `check_runs`, `evaluate_run`, `ensure_digits_generator`, the resources of a run
(`ray_resources`, `clients_at_once`), the `show_*` functions of `progress.py`, the sweeps (`sweep.py`, `run_sweep`), and
the ports and environment of `superlink.py`.
"""
