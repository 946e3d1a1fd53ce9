"""Check whether this machine, or a deployment, can do a run.

Other rooms use `Finding`, `examine` and `deployment.examine`.
"""
