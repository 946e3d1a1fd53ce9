"""Checks of what this machine, or a deployment, can do for a run.

Other rooms use `Finding`, `examine` and `deployment.examine`.
"""
