"""A client's network, its local training, and the evaluation of models.

Only `build.py` imports `gpu/`.
"""
