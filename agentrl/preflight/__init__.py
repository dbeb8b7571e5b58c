"""What `check` and `doctor` run: everything that can be known without loading weights."""
