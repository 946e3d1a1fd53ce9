"""What runs a round, and what crosses the wire.

Other rooms use `Federation`, `count_clients`, `messages.py`, `InlineGrid`, and what clients keep between rounds:
`ClientStore`, `ClientState`, `write_kept_states`, `forget_kept_states`.
"""
