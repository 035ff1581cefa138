"""An application that used slowapi: no `request` argument, no exception handler, and the store does not block the event loop."""

from fastapi import Depends, FastAPI

from limitkeeper.web.fastapi import RateLimit, install

app = FastAPI()
install(app)


@app.get("/home", dependencies=[Depends(RateLimit("fixed window 5/min"))])
async def home() -> dict[str, str]:
    return {"page": "home"}


@app.get("/mars", dependencies=[Depends(RateLimit("fixed window 5/min; fixed window 2/s"))])
async def mars() -> dict[str, str]:
    return {"page": "mars"}
