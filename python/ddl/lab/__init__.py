"""What the command `ddl` does: data, training, evaluation, analysis, and the commands."""
