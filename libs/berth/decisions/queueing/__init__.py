"""The order in which waiting jobs are served."""
