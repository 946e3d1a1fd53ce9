"""The command line of `fedeas`: one file per command or group of commands. Only `__main__` imports it."""
