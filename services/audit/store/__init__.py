"""Audit's tables and what is asked of them."""
