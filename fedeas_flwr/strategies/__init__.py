"""Federated learning algorithms, which `registry.py` finds and builds, and differential privacy (`privacy.py`).

Our own algorithms have one file each. `flower.py` adapts those that Flower provides. `config.STRATEGIES` lists both.

Other packages use the registry (`find_algorithm`, `build_strategy`, `client_part`, `table_rows`), the interface of an
algorithm, Flower's records (`records.py`), `averaging.py`, `FlowerStrategyAdapter` and `clips_update`.
"""
