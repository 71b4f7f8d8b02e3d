"""Run the project's CUDA kernels on the CPU, from the same source that NVRTC compiles.

Each CUDA thread is a fiber with its own stack. One OS thread switches between the fibers of a block
at barriers and warp operations. Undefined behaviour fails the launch with a message: divergent
barriers and shuffles, accesses out of bounds, misaligned accesses.

    build.py    compiles a kernel file for one set of macros      -> a shared object
    launch.py   runs a kernel from it, with a ctypes structure as argument
    memory.py   tensors followed by memory that faults
    traffic.py  bytes that kernels read and write of a tensor
    source.py   the C++ made from a kernel file
    device/     headers for kernels: CUDA's names in plain C++
    runtime/    fibers, blocks, launches; compiled once
    faults.cu   correct kernels and kernels with one bug each, for test_emulator.py

Environment, read at each launch:

    DDL_EMULATOR_ORDER     0: threads and blocks in ascending order (the default); 1: descending;
                           any other number: the seed of a random order
    DDL_EMULATOR_THREADS   OS threads that share a grid's blocks (default 1)
    DDL_EMULATOR_LAST_BLOCKS   per kernel, run only the grid's last blocks, as in
                           "reduce=1 expand_fwd=2": memory of the other blocks is not touched

and at each build `DDL_EMULATOR_CACHE`, the directory of the shared objects (default
build/emulator).

Sanitizers find more: ASan names the line of an access out of bounds, TSan the lines that a missing
barrier leaves unordered, between threads of a block and between blocks.

Not found: errors that only real parallelism shows, such as a missing fence; divergence between two
calls of one helper, whose barriers share a source line; a thread that spins for ever. Not modelled:
inline PTX, registers, time. g++ accepts code that NVRTC does not, so both must compile each kernel.
"""
