"""Backend "triton": the kernels and their launchers."""
