"""The example shop: `make serve`."""
