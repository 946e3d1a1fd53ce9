"""Train diffusion models, which then serve as generators.

Other packages use `run.train_generator`, the presets, and `builtin.py`, the built-in generator of digits.
"""
