"""Services: how many replicas, of which version. Each replica is a job of its own for the other parts."""

from berth.decisions.serving.core import ServingCore

__all__ = ["ServingCore"]
