"""Two processes that share one limit in Redis. Run it with: python redis_two_processes.py redis://127.0.0.1:6379"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from limitkeeper import Limiter


def admitted(url: str) -> int:
    limiter = Limiter("100/day", store=url, name="exports")
    return sum(bool(limiter.hit("acme")) for _ in range(80))


if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        counts = list(processes.map(admitted, [sys.argv[1]] * 2))
    print(f"{sum(counts)} of 160 calls were admitted")
