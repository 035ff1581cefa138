"""The fault lab: faults, the traffic meanwhile, and the bounds of every mode."""
