"""An application that used Flask-Limiter: a limit for all views, one view of its own, one exempt, a shared limit."""

from flask import Flask

from limitkeeper.policy import Policy
from limitkeeper.web.flask import RateLimit

app = Flask(__name__)
limits = RateLimit(app, Policy.of(limits=[{"name": "default", "key": "ip", "limit": "fixed window 50/h"}]))


@app.get("/slow")
@limits.limit("fixed window 1/day")
def slow() -> str:
    return "24"


@app.get("/ping")
@limits.exempt
def ping() -> str:
    return "PONG"


@app.get("/export")
@limits.limit("fixed window 2/h", name="exports")  # the same name elsewhere: one shared limit
def export() -> str:
    return "rows"
