"""Whom to stop so that another can start."""
