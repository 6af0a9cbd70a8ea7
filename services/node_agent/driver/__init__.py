"""What an agent needs to know of its cards, and two ways to know it: NVML, and a simulation."""
