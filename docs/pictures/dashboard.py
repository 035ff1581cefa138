"""Takes the picture of the dashboard: `python docs/pictures/dashboard.py` starts the service and writes dashboard.png.

It needs Playwright and Chromium; without them it says so, and the old picture stays.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).resolve().with_name("dashboard.png")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-sync")
PORTS = ("--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--admin", "127.0.0.1:0")


def main() -> int:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sync_playwright = None
    if sync_playwright is None or CHROMIUM is None:
        print("docs/pictures/dashboard.png stays as it is: taking it again needs playwright and Chromium", file=sys.stderr)
        return 0
    command = [
        sys.executable,
        "-m",
        "limitkeeper",
        "serve",
        str(ROOT / "examples/service/limitkeeper.yaml"),
        "--workers",
        "2",
        *PORTS,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as service, sync_playwright() as driver:
        try:
            assert service.stdout is not None
            line = next(line for line in service.stdout if line.startswith("  admin"))
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in FLAGS])
            page = browser.new_page(viewport={"width": 1280, "height": 1040})
            take(page, re.sub(r"^ *admin *", "", line.strip()))
            browser.close()
        finally:
            service.terminate()
    print(f"docs/pictures/{PICTURE.name}: {PICTURE.stat().st_size // 1000} kB")
    return 0


def take(page, address: str) -> None:  # type: ignore[no-untyped-def]
    """Thirty seconds of traffic on two rules, an override and a blocked key."""
    page.goto(address)
    page.wait_for_selector("#live.ok")
    for key, limit, reason in (("premium_*", "token bucket 50/s burst 100", "campaign"), ("user:666", "blocked", "abuse")):
        page.request.put(f"{address}/v1/overrides/checkout/{key}", data={"limit": limit, "for": "1h", "reason": reason})
    for limit, rate in (("checkout", 160), ("search", 90), ("checkout", 280), ("login", 25), ("checkout", 120)):
        page.request.post(f"{address}/v1/load", data={"limit": limit, "rate": rate, "seconds": 12, "keys": 40})
        time.sleep(6)
    page.screenshot(path=PICTURE)


if __name__ == "__main__":
    sys.exit(main())
