"""Compiled modules of the benchmarks (floors.pyx, load.pyx), built anew for each run against the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def built(name: str, folder: str) -> Any:
    """The module of `name`.pyx, compiled in `folder`."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    import limitkeeper

    around = str(Path(limitkeeper.__file__).parent.parent)
    source = Path(folder, f"{name}.pyx")
    source.write_text((HERE / f"{name}.pyx").read_text())
    flags = [] if sys.platform == "win32" else ["-O3", "-fno-semantic-interposition"]
    modules = cythonize(
        [Extension(name, [str(source)], extra_compile_args=flags)],
        compiler_directives={"language_level": 3, "binding": True},
        include_path=[around],
        quiet=True,
    )
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = folder
    command.ensure_finalized()
    command.run()
    sys.path.insert(0, folder)
    return importlib.import_module(name)
