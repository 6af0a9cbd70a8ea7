"""Nodes and cards: who is heard, what is healthy, and what may get new work."""

from berth.decisions.health.core import InventoryCore

__all__ = ["InventoryCore"]
