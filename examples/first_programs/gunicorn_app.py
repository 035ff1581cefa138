"""One limit for all workers of a host, without a server. Run it with: gunicorn --workers 4 gunicorn_app:app"""

import os

from flask import Flask

from limitkeeper.web.flask import RateLimit

app = Flask(__name__)
limits = RateLimit(app, store=os.environ.get("LIMITS", "shared:///tmp/shop.limits"))


@app.get("/")
@limits.limit("20/h")
def home() -> dict[str, int]:
    return {"worker": os.getpid()}
