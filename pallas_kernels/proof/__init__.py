"""What compilers of TPUs and GPUs make of the kernels, on a machine without; see ``pallas_kernels.prove``."""
