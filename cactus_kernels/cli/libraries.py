"""Libraries whose own words would stand among those of the command."""

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging


def silence() -> None:
    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
