"""The ClientApp, where Flower's own examples keep it; the code is in fedeas_flwr/client_app.py."""

from fedeas_flwr.client_app import app

__all__ = ["app"]
