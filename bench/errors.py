"""Why a bench could not run."""

from __future__ import annotations


class BenchFailed(Exception):
    """No figure: the platform or a job did not do what the bench needs; the message names what to look at."""
