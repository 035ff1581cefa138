"""The flash sale at laptop size, with real processes: `make demo`."""
