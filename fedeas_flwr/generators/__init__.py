"""Generators of synthetic images: open, train and serve them, check their images, and cache the images."""

from fedeas_flwr.generators.interface import Generator, SampleId

__all__ = ["Generator", "SampleId"]
