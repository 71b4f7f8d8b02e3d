"""Everything that the command `ddl` does: data, training, evaluation, analysis, and their commands."""
