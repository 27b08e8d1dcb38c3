"""The one compiled module; everything else is in setup.cfg."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cpdhpc._cpu",
            ["kernels/cpu_loops.cpp", "kernels/cpu_module.cpp"],
            depends=[str(path) for path in Path("kernels").glob("*.h")],
            # Without -ffp-contract=off the clones for different processors would round differently.
            extra_compile_args=["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        )
    ]
)
