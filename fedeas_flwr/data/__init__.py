"""Datasets: images and labels, and the part that each client holds.

The rule that partitions a dataset is in `fedeas_flwr/partition.py`.
"""
