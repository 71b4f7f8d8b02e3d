"""The GPU benchmark. `python benchmarks/gpu` runs it; main.py describes its parts."""
