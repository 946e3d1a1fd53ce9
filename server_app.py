"""The ServerApp, where Flower's own examples keep it; the code is in fedeas_flwr/server_app.py."""

from fedeas_flwr.server_app import app

__all__ = ["app"]
