"""The engine that replays training steps as CUDA graphs, and the Triton kernels it uses.

Only `training/build.py` imports it, when a run trains on a GPU.
"""
