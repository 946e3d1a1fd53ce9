"""The command line of `fedeas`: one file per command or group of commands, and the helpers that they share.

Only `__main__` imports this package.
"""
