"""Files, text, numbers, processes and devices: helpers that are independent of learning.

Other rooms may use all of it. Only `devices.py` and `cuda.py` import torch.
"""
