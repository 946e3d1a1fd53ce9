"""Callbacks of a run (`callbacks = "tensorboard, early-stop(target=0.8)"`), one file for each built-in one.

A custom callback may use `StopRun`.
"""
