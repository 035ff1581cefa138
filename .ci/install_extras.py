"""Installs what extras of pyproject.toml need, without building the package: `install_extras.py test lint`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> int:
    page = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    project = page["project"]
    wanted = [*page["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    # Without byte-compiling, which costs 20 s for modules that are mostly never imported; Python does it on first import.
    options = ["--disable-pip-version-check", "--no-compile", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "install", *options, *wanted]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        collected = 0
        for line in pip.stdout:
            if line.startswith("Collecting "):
                collected += 1
                print(f"[{collected:3}] {line.split()[1]}", flush=True)
            elif line.startswith("Installing collected packages"):
                print(f"installing {collected} packages", flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
