"""What `m` is in the body of a rule outside the kernels: the names of `triton.language` for torch and for numpy."""
