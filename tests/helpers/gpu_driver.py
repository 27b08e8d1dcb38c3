"""A CUDA driver of two GPUs, as far as it says which ones a process sees."""

import subprocess
from pathlib import Path

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const char *seen(void) {
    const char *s = getenv("CUDA_VISIBLE_DEVICES");
    return s ? s : "0,1";
}
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) {
    const char *s = seen();
    *count = *s ? 1 : 0;
    for (; *s; s++) *count += *s == ',';
    return *count ? 0 : 100;
}
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
static int real(int device) { return atoi(seen() + 2 * device); }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 16 + real(device), 16); return 0; }
int cuDeviceGetPCIBusId(char *to, int size, int device) {
    return snprintf(to, size, "0000:%02X:00.0", 0xA0 + real(device)) < 0;
}
"""


def two_gpus_in(directory: Path) -> Path:
    """Make the driver; return the folder for LD_LIBRARY_PATH."""
    folder = directory / "driver"
    folder.mkdir()
    source = folder / "cuda.c"
    source.write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)
    return folder
