"""Where synthetic images come from: generators, how they are opened, shared among clients, trained and measured."""

from fedeas_flwr.generators.interface import Generator, SampleId

__all__ = ["Generator", "SampleId"]
