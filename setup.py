"""Compiles the hot path from the same source that runs without a compiler.

LIMITKEEPER_REQUIRE_COMPILED=1  fail when it can't be compiled
LIMITKEEPER_DISABLE_COMPILED=1  do not compile, run the plain source
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError
from setuptools.modified import newer_group

#: Every compiled module, as a path without its ending. `tests/conventions/test_compiled.py` holds this list to the files.
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
    "stores/wrapper_store",
    "stores/several_rates_per_key",
    "stores/cell_store",
    "stores/shared/journal",
    "stores/shared/log_rings",
    "stores/shared/cell_table",
    "stores/shared/store",
    "stores/cell_table",
    "stores/memory",
    "stores/guarded/store",
    "stores/sharded/hot_key_detector",
    "stores/sharded/router",
    "stores/sharded/store",
    "stores/leased/key_lease",
    "stores/leased/lease_cache",
    "stores/leased/store",
    "sharing/virtual_time_admission",
    "sharing/tenant_fair_share",
    "policy/request_context",
    "policy/compiled_rule",
    "policy/compiled_policy",
    "policy/refusal",
    "policy/evaluation",
    "web/headers",
    "web/wsgi",
    "simulate/event_loop",
    "simulate/services",
    "simulate/calls",
    "simulate/clients",
    "service/fast_connection",
    "service/resp_fast",
    "service/http_fast",
)
#: What every hit in memory goes through. The rest is compiled with -O2, in three quarters of the time and as quick as with -O3;
#: -O1 takes half, but a request with five rules costs 5 % more. Debug information (-g, from Python's own flags) cost a third of
#: the time and 85 % of the size. Without effect on the time: docstrings, `binding`, pickling, C lines in tracebacks.
HOT = ("decision", "limiter_base", "algorithms/", "stores/cell_", "stores/memory")
#: A cdef class is passed where C declares `PyObject *`, which GCC 14 makes an error.
FLAGS = (
    "-g0",
    "-fno-semantic-interposition",
    "-fno-tree-slp-vectorize",
    "-Wno-array-bounds",
    "-Wno-incompatible-pointer-types",
)
REQUIRED = os.environ.get("LIMITKEEPER_REQUIRE_COMPILED") == "1"
DISABLED = os.environ.get("LIMITKEEPER_DISABLE_COMPILED") == "1"


BUILD_ERRORS = (BaseError, CCompilerError, OSError)


def extensions() -> list[Extension]:
    if REQUIRED and DISABLED:
        raise SystemExit("LIMITKEEPER_REQUIRE_COMPILED and LIMITKEEPER_DISABLE_COMPILED can't both be set: unset one")
    if DISABLED or (platform.python_implementation() != "CPython" and not REQUIRED):
        return []
    found = []
    for module in COMPILED:
        source = f"src/limitkeeper/{module}.pyx"
        if not os.path.exists(source):
            source = f"src/limitkeeper/{module}.py"
        name = "limitkeeper." + module.replace("/", ".")
        flags = [] if os.name == "nt" else ["-O3" if module.startswith(HOT) else "-O2", *FLAGS]
        strip = ["-s"] if sys.platform == "linux" else []
        found.append(Extension(name, [source], extra_compile_args=flags, extra_link_args=strip, depends=["setup.py"]))
    return found


class BuildAllOrNothing(build_ext):
    """Cythonizes and compiles the modules in parallel; where one fails, the package is installed as plain source.

    All or nothing, because a compiled module imports the C interface of others. `Extension(optional=True)` can't say that:
    it is per module, and `cythonize` drops it.
    """

    def run(self) -> None:
        inplace = self.inplace
        try:
            super().run()
        except BUILD_ERRORS as error:
            if REQUIRED:
                raise
            for extension in self.extensions:
                file = self.get_ext_filename(extension.name)
                for root in (self.build_lib, "src") if inplace else (self.build_lib,):
                    Path(root, file).unlink(missing_ok=True)
            self.extensions = []
            self.warn(f"limitkeeper runs as plain Python, without its compiled core: {error}")

    def build_extensions(self) -> None:
        """Modules are cythonized one after another while the C compiler works on the ones before, so that a failure is early."""
        from Cython.Build import cythonize

        directives = {"language_level": 3, "cdivision": True, "binding": True, "warn.unreachable": False}  # plain-source branches
        self.done, self.lock = 0, Lock()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs: list[Future[None]] = []
            try:
                declared = newest(Path("src").rglob("*.pxd"))
                options = {"compiler_directives": directives, "include_path": ["src"], "build_dir": "build/cython"}
                for extension in self.extensions:
                    # Cython does not follow all declarations: a class that grew must not be met at its old size.
                    force = newest([Path(self.get_ext_fullpath(extension.name))]) < declared
                    made = cythonize([extension], quiet=True, force=force, **options)
                    extension.sources = made[0].sources
                    jobs.append(pool.submit(self.compile, extension))
                    for job in jobs:
                        if job.done():
                            job.result()
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def compile(self, extension: Extension) -> None:
        """Compiles one module when it is older than its source, and prints `[ 7/38] stores/memory`."""
        stale = newer_group([*extension.sources, *extension.depends], self.get_ext_fullpath(extension.name))
        self.build_extension(extension)
        with self.lock:
            self.done += 1
            if stale:
                module = extension.name.removeprefix("limitkeeper.").replace(".", "/")
                print(f"[{self.done:2}/{len(self.extensions)}] {module}", flush=True)


def newest(paths: Iterable[Path]) -> float:
    """When the newest of these files was written; 0 when there is none."""
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


IMPORT = """try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]
"""
SHIM = "from limitkeeper import _cython_shim as cython"


def plain_source(text: str) -> str:
    """A source without its module-level branches for the C compiler, which type checkers can't tell apart; lines stay."""
    found: list[str] = []
    branch = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            other = {"drop": "keep", "keep": "drop"}.get(branch, "") if line == "else:" else ""
            branch = {"if cython.compiled:": "drop", "if not cython.compiled:": "keep"}.get(line, other)
            found.append("" if branch else line)
        else:
            found.append({"drop": "", "keep": line.removeprefix("    ")}.get(branch, line))
    return "\n".join(found) + "\n"


class PlainSource(build_py):
    """Installs the compiled modules' sources as type checkers and plain Python read them."""

    def build_module(self, module: str | list[str], module_file: str, package: str | list[str]) -> object:
        outcome = super().build_module(module, module_file, package)
        target = Path(outcome[0])
        text = target.read_text()
        if IMPORT in text:
            target.write_text(plain_source(text.replace(IMPORT, f"{SHIM}\n\n\n\n")))
        return outcome


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildAllOrNothing, "build_py": PlainSource})
