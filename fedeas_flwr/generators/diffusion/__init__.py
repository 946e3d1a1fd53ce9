"""Class-conditional diffusion models: reading one from its folder and sampling from it.

`sampler.py` has the generator; `model_folder.py` checks what is in a folder.
"""
