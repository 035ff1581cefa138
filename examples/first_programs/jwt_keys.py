"""Limits by the user and the plan of a signed token. Run it with: uvicorn jwt_keys:app"""

from fastapi import FastAPI

from limitkeeper.policy import Policy
from limitkeeper.web.asgi import RateLimitMiddleware

policy = Policy.read("""
identify:
  user: {jwt: {claim: sub, key: a secret of at least 32 bytes 123, algorithms: [HS256]}}
  plan: {jwt: {claim: plan}, default: free}
limits:
  - name: api
    key: user | ip
    limit: {by: plan, free: fixed window 2/min, pro: fixed window 5/min}
""")
app = FastAPI()
app.add_middleware(RateLimitMiddleware, policy=policy)


@app.get("/")
async def home() -> dict[str, str]:
    return {"page": "home"}
