"""Class-conditional diffusion models: read a model from its folder and sample images from it.

`sampler.py` has the generator; `model_folder.py` checks the contents of a model's folder.
"""
