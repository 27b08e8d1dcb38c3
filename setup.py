"""The one compiled module; everything else is in setup.cfg."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cpdhpc._cpu",
            [
                "kernels/cpu_module.cpp",
                "kernels/cpu_portable.cpp",
                "kernels/cpu_v3.cpp",
                "kernels/cpu_v4.cpp",
            ],
            depends=[str(path) for path in Path("kernels").glob("*.h")],
            # Without -ffp-contract=off the loops for different processors would round differently.
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-Wno-psabi",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        )
    ]
)
