"""The paper's tables and figures, made from runs, with the paper's numbers next to ours.

Only `commands/` uses this package. `items.py` has every table and figure by name, `cells.py` their run-configs.
"""
