"""vLLM verifies drafts by a rule of this package: an entry point of `vllm.general_plugins` (docs/vllm.md).

Nothing is imported here: what fails while vLLM imports a plugin is only logged, and stock verification runs; what fails while
`register` is called stops the process.
"""


def register():
    """Called by vLLM in each of its processes: a worker made from now on verifies as its configuration says.

    Raises:
        RuntimeError: a vLLM whose workers are not known here.
    """
    import functools
    import inspect

    from vllm.v1.worker.worker_base import WorkerBase

    from .patch import activate, differs

    stock = WorkerBase.__init__
    if hasattr(stock, "activates_cactus"):  # vLLM may load its plugins more than once
        return
    if list(inspect.signature(stock).parameters)[:2] != ["self", "vllm_config"]:
        raise RuntimeError(
            differs("WorkerBase", stock, "(vllm_config, ...)") + ", or leave this plugin out by VLLM_PLUGINS"
        )

    @functools.wraps(stock)
    def __init__(self, vllm_config, *args, **kwargs):
        stock(self, vllm_config, *args, **kwargs)
        self.cactus = activate(vllm_config)

    __init__.activates_cactus = True
    WorkerBase.__init__ = __init__
