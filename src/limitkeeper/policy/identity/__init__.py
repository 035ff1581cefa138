"""Who a request is, and what its path and host are called: facts that rules can rely on."""

__all__: list[str] = []
