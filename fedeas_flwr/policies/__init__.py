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

A new policy is a class here and one line in `registry.py`. This package needs NumPy only.
"""
