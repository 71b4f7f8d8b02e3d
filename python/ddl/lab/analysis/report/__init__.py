"""Report: one HTML page about runs, with charts, that needs no network."""
