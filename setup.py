"""Compiles the hot path from the same source that runs without a compiler.

LIMITKEEPER_REQUIRE_COMPILED=1  fail when it can't be compiled
LIMITKEEPER_DISABLE_COMPILED=1  do not compile, run the plain source
"""

from __future__ import annotations

import os
import platform

from setuptools import Extension, setup

#: Every compiled module, as a path without its ending. `tests/house/test_compiled.py` holds this list to the files.
COMPILED = (
    "decision",
    "clock",
    "limiter_base",
    "algorithms/limit",
    "algorithms/claim",
    "algorithms/all_of",
    "algorithms/token_bucket",
    "algorithms/leaky_bucket",
    "algorithms/leaky_queue",
    "algorithms/fixed_window",
    "algorithms/sliding_log",
    "algorithms/sliding_counter",
    "stores/contract",
    "stores/cell_store",
    "stores/shared/journal",
    "stores/shared/log_rings",
    "stores/shared/cell_table",
    "stores/shared/locked_file",
    "stores/shared/store",
    "stores/cell_table",
    "stores/memory",
    "stores/sharded/hot_keys",
    "stores/sharded/routing",
    "stores/leased/lease",
    "stores/leased/lease_cache",
    "stores/leased/store",
    "policy/request_context",
    "policy/evaluation",
    "policy/compiled_rule",
    "policy/compiled_policy",
    "policy/refusal",
    "policy/evaluate",
    "web/ratelimit_fields",
    "web/headers",
    "web/asgi_fast",
    "web/wsgi_fast",
)
REQUIRED = os.environ.get("LIMITKEEPER_REQUIRE_COMPILED") == "1"
DISABLED = os.environ.get("LIMITKEEPER_DISABLE_COMPILED") == "1"


def extensions() -> list[Extension]:
    if REQUIRED and DISABLED:
        raise SystemExit("LIMITKEEPER_REQUIRE_COMPILED and LIMITKEEPER_DISABLE_COMPILED can't both be set: unset one")
    if DISABLED or (platform.python_implementation() != "CPython" and not REQUIRED):
        return []
    from Cython.Build import cythonize

    found = []
    for module in COMPILED:
        source = f"src/limitkeeper/{module}.pyx"
        if not os.path.exists(source):
            source = f"src/limitkeeper/{module}.py"
        name = "limitkeeper." + module.replace("/", ".")
        flags = [] if os.name == "nt" else ["-O3", "-fno-semantic-interposition", "-fno-tree-slp-vectorize", "-Wno-array-bounds"]
        found.append(Extension(name, [source], extra_compile_args=flags, optional=not REQUIRED))
    directives = {"language_level": 3, "cdivision": True, "binding": True}
    return list(cythonize(found, compiler_directives=directives, include_path=["src"], build_dir="build/cython"))


setup(ext_modules=extensions(), options={"build_ext": {"parallel": os.cpu_count() or 1}})
