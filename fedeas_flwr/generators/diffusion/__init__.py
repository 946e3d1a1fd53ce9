"""Class-conditional diffusion models: read one from its folder and sample from it.

`sampler.py` has the generator; `model_folder.py` checks what is in a folder.
"""
