"""Files, text, numbers, processes and devices: helpers that know nothing about learning.

Other rooms may use all of it. Only `devices.py` and `cuda.py` import torch.
"""
