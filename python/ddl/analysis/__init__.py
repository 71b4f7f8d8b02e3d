"""Analysis of what training has left: comparisons of runs."""
