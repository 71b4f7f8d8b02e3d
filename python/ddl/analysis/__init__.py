"""Looking inside models: `ddl.analysis.spectra` has figures of the rewrites of a token."""
