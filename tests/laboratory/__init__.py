"""The fault laboratory: what is broken, who makes traffic meanwhile, and what every mode promises."""
