"""Set up a federation of real machines: folders, certificates, start scripts and the registration of nodes.

Other packages use `Deployment`, `write_deployment`, `read_deployment`, `register_nodes` and `list_nodes`.
"""
