"""Shared by the benchmarks: timing, correctness gates, byte counts, problems, models, records."""
