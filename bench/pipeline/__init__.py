"""Benches of the running platform: throughput, start latency, start-up and memory."""
