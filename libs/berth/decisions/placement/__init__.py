"""Who gets which GPUs now: the one commit point."""
