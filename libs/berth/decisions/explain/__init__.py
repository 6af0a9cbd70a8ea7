"""Why a job waits, and what would help."""
