"""The fault lab: what is broken, the traffic meanwhile, and what every mode promises."""
