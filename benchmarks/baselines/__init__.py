"""Plain PyTorch to compare with: as fast as a careful user would write it, without ddl-rs."""
