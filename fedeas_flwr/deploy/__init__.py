"""A federation of real machines: folders, certificates, registration.

Other rooms use `Deployment`, `write_deployment`, `read_deployment`, `register_nodes` and `list_nodes`.
"""
