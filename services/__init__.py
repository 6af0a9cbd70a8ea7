"""The parts of Berth that run as processes; each owns its data and meets the others through events only."""
