"""The CUDA backend: own kernels, compiled by NVRTC at run time, no vendor library of linear algebra."""
