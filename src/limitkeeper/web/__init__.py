"""A policy in front of a web application: ASGI, WSGI, FastAPI, Flask, Django, gRPC, thin over one gate."""

__all__: list[str] = []
