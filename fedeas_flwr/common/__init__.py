"""Helpers that are independent of learning: files, text, tables, random numbers, processes and devices.

Other packages may use all of them. Only `devices.py` and `cuda.py` import torch.
"""
