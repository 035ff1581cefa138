"""An application that used slowapi: no `request` argument, no exception handler, and the store does not block the event loop."""

from fastapi import FastAPI

from limitkeeper.web.fastapi import install, limit

app = FastAPI()
install(app)


@app.get("/home")
@limit("fixed window 5/min")
async def home() -> dict[str, str]:
    return {"page": "home"}


@app.get("/mars")
@limit("fixed window 5/min; fixed window 2/s")
async def mars() -> dict[str, str]:
    return {"page": "mars"}
