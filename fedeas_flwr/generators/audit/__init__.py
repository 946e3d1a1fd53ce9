"""Audit a generator for memorisation of its training images: nearest neighbours and membership inference.

Other packages use `audit.Audit`, `neighbours.LabelledImages` and `picture.draw_neighbours`.
"""
