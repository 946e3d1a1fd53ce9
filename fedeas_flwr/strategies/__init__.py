"""Federated learning algorithms, listed in `registry.py`, and differential privacy (`privacy.py`).

Our own algorithms have one file each. `flower.py` adapts those that Flower provides.

Other packages use the registry (`ALGORITHMS`, `build_strategy`, `client_part`, `table_rows`), the interface of an
algorithm, Flower's records (`records.py`), `averaging.py`, `FlowerStrategyAdapter` and `clips_update`.
"""
