"""Analysis: figures of the rewrites of a token, and comparisons of runs."""
