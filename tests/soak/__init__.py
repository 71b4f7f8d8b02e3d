"""Random problems for all operators, against the reference in float64: `make soak`."""
