"""Servers and processes that Berth starts itself when nobody runs them for it."""
