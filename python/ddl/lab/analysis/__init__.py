"""Analysis: spectra and inspections of rewrites, comparisons of runs, and reports on them."""
