"""Flask with a limit on a view, counted by API key. Run it with: flask --app flask_app run"""

from flask import Flask, Request

from limitkeeper.web.flask import RateLimit

app = Flask(__name__)
limits = RateLimit(app)


def api_key(request: Request) -> str | None:
    return request.headers.get("X-Api-Key")  # None: the client's address


@app.get("/search")
@limits.limit("fixed window 3/min", key=api_key)
def search() -> list[str]:
    return ["tea"]
