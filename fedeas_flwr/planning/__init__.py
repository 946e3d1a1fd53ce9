"""Compute a policy's plan from label counts before anything is generated, choose β, and compute the plan's figures.

The policies themselves are in `fedeas_flwr/policies/` and `fedeas_flwr/allocation.py`.
"""
