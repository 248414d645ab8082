"""What `collective_rpc` may call in vLLM's workers."""

from .patch import parse_rule


class CactusWorker:
    """For vLLM's `worker_extension_cls`: its methods become those of every worker."""

    cactus = None  # a `Verifier` where this worker was started with one

    def cactus_status(self):
        """What this worker verifies by: {"rule", "calls", "invalid"}, or None where vLLM verifies. Waits for the device."""
        return None if self.cactus is None else self.cactus.status()

    def set_cactus(self, settings):
        """Verify by another rule or strength from the next step on: an object as in `additional_config`.

        Raises:
            ValueError, TypeError: a rule or strength that cannot be had.
            RuntimeError: this worker was started without.
        """
        rule = parse_rule(settings)
        if self.cactus is None:
            raise RuntimeError('vLLM verifies here: start it with "cactus" in additional_config')
        self.cactus.rule = rule
        return repr(rule)
