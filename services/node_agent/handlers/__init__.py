"""One function for each command, and for each thing that happens to a worker."""
