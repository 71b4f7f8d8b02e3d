"""Runs the project's CUDA kernels on the CPU, from the very text that NVRTC compiles.

Each CUDA thread is a fiber, a stack of its own; one OS thread switches between the fibers of a
block at barriers and warp operations. What a GPU would leave undefined fails the launch with a
sentence instead: divergent barriers and shuffles, accesses outside of memory, misaligned ones.

    build.py    compiles a kernel file for one set of macros      -> a shared object
    launch.py   runs a kernel from it, with a ctypes structure as argument
    memory.py   tensors whose end touches memory that faults
    traffic.py  bytes that kernels read and write of a tensor
    source.py   the C++ made from a kernel file
    device/     what the kernel's text sees: CUDA's names in plain C++
    runtime/    fibers, blocks, launches; compiled once
    faults.cu   correct kernels and kernels with one bug each, for test_emulator.py

Environment, read at each launch:

    DDL_EMULATOR_ORDER     0: threads and blocks in ascending order (the default); 1: descending;
                           any other number: the seed of a random order
    DDL_EMULATOR_THREADS   OS threads that share a grid's blocks (default 1)
    DDL_EMULATOR_LAST_BLOCKS   of some kernels only the grid's last blocks are run, as in
                           "reduce=1 expand_fwd=2": what they leave out, memory need not hold

and at each build `DDL_EMULATOR_CACHE`, the directory of the shared objects (default
build/emulator).

Sanitizers go further: ASan names the line that leaves memory, TSan the lines that a missing
barrier leaves unordered, between threads of a block and between blocks.

Not found: what only real parallelism shows, such as a missing fence; divergence between two calls
of one helper, whose barriers share a line of text; a thread that spins for ever. Not modelled:
inline PTX, registers, time. g++ accepts text that NVRTC does not, so both must compile every
kernel.
"""
