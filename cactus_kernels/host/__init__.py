"""Backend "torch": numpy and torch on the host, fast on a CPU. Rows of a GPU are copied there."""
