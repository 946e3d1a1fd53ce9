"""Set up a federation of real machines: folders, certificates, start scripts and the registration of nodes.

Other packages use `Deployment`, `write_deployment`, `read_deployment`, `register_nodes`, `list_nodes`,
the readers of a node's folder, and `maintenance`, which changes a deployment.
"""
