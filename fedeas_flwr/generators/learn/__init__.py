"""Training of diffusion models to generate with.

Other rooms use `run.train_generator`, the presets, and `builtin.py`, the generator of digits.
"""
