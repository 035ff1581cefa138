"""The example shop: `make shop`."""
