"""Run federated rounds: the server's side, the messages, and the state that clients keep between rounds.

`Augmenter` and `with_fedeas` are for other Flower apps. Other packages use `Federation`, `count_clients`,
`messages.py`, `InlineGrid`, `ClientStore`, `ClientState`, `kept_states_writer` and `forget_kept_states`.
"""
