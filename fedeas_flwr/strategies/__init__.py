"""Federated learning algorithms, which `registry.py` finds and builds, and differential privacy (`privacy.py`).

Our own algorithms have one file each. `flower.py` adapts those that Flower provides. `config.STRATEGIES` lists both.
"""
