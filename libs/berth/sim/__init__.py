"""The second shell of the decision cores: simulated clock, bus and fleet, and the player of scenarios."""
