"""FastAPI with two routes, each with a limit of its own. Run it with: uvicorn fastapi_app:app"""

from fastapi import Depends, FastAPI

from limitkeeper.web.fastapi import RateLimit, install

app = FastAPI()
install(app)


@app.post("/login", dependencies=[Depends(RateLimit("5/min"))])
async def login() -> dict[str, str]:
    return {"session": "started"}


@app.get("/search", dependencies=[Depends(RateLimit("10/s burst 20"))])
async def search() -> list[str]:
    return ["tea"]
