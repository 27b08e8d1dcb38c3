"""Sources of the CPU and CUDA kernels, shipped so that the CUDA ones compile at run time."""
