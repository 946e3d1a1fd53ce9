"""Check whether this machine, or a deployment, is ready for a run.

Other packages use `Finding`, `examine` and `deployment.examine`.
"""
