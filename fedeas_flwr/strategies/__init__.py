"""Learning algorithms, one file each, listed in `registry.py`.

Other packages use the registry (`ALGORITHMS`, `build_strategy`, `client_part`, `table_rows`), the interface of an
algorithm, Flower's records (`records.py`), `averaging.py`, `FlowerStrategyAdapter` and `clips_update`.
"""
