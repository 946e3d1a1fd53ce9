"""Audit a generator for memorisation of its training images: nearest neighbours and membership inference."""
