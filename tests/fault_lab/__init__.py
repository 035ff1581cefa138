"""The fault fault_lab: what is broken, who makes traffic meanwhile, and what every mode promises."""
