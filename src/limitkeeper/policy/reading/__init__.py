"""Reading policies: from a file, a text or Python to values, with every mistake at its place."""

__all__: list[str] = []
