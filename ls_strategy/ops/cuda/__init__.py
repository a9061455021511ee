"""The kernels of ``csrc/*.cu`` on NVIDIA GPUs, compiled and launched from Python: no ``nvcc`` and no C++ compiler.

::

    csrc/*.cu ──> nvrtc ──> a file in the cache ──> driver ──> kernels on torch's current stream
                  compiles for one architecture     loads and launches
                  (comes with torch)                (comes with the GPU's driver)

`program` ties the two together; `update`, `routing` and `quantized` hold the host's side of each operation: checks,
grids, temporary memory. A kernel's arguments are declared once, beside its name. Tests compare them with what the
compiler says of the kernel, and run the kernels in an emulation with exactly the arguments that a GPU would get.
"""
