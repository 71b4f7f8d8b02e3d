"""The work of the command `ddl`: data, training, evaluation, analysis, and the commands."""
