"""Runs of real limiters, drawn: in the terminal, as SVG, as a page. Shared by the demo and the pictures of the docs."""
