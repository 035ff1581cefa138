"""Real servers that tests start, break and stop. Those that examples start, too, are in examples/local_servers.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
