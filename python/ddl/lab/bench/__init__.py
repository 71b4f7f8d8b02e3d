"""`ddl bench`: operators, blocks and models against their baselines, on the user's machine.

The scripts in benchmarks/ of the repository import the same clock, checks, byte counts, baselines
and records from here. A time is reported only if the result agreed with `ddl.reference` in the same
run.
"""
