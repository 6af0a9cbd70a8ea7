"""Berth: governs and schedules scarce GPUs for teams that share them, and can say why."""
