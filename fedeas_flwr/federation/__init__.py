"""Run federated rounds: the server's side, the messages, and the state that clients keep between rounds.

`Augmenter` and `with_fedeas` are for other Flower apps.
"""
