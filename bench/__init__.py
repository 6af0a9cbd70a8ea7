"""Measures the whole platform: `python -m bench`, one JSON line for each figure. Protocols: README.md."""
