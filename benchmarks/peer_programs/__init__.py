"""The programs that benchmarks/peers.py compares: one file for each framework, with one job described in job.py.

They import no module of this project, so that they also run in an environment where it is not installed.
"""
