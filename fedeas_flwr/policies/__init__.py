"""Allocation policies (``policy=``). Only this package makes decisions by a policy's name.

A policy is one object. `fedeas plan`, a simulation, a SuperNode, the cost estimate and the server's checks all call it:

    any policy     ``plan``         client: how many images of each class it adds, computed from its own counts
                   ``max_total``    server: the largest total that a client may report
    matched ones   ``reply``        client: the integers that it sends to the server, never its counts
                   ``split_total``  server: each client's share of one total, computed from these integers
    adaptive ones  ``score``        client: how much an image of each class would help, by the global model's errors
                   ``due``          server: the number of images that the clients buy before a round

Each row of a view is one client. On a node, a view has one row: the client's own. The plan of a whole federation makes
the same calls with one row per client. A policy treats rows independently, so plan and run cannot disagree.

interface.py   what a policy is, and its input
built_in.py    policies that need a client's counts only: FedEAS, its ablations, Full-Balance, oversample
matched.py     policies that distribute one total over all clients: Uniform, Missing-only, Waterfill
adaptive.py    policies that spend FedEAS's total in parts, during training
registry.py    all of them by name, and `allocate`; a new policy is a class and one line there
own.py         policies of a user's own package, by import path

This package needs NumPy only.
"""
