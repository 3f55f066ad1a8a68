"""The mark of pickling for a worker process of this machine."""

import contextvars

sharing: contextvars.ContextVar[bool] = contextvars.ContextVar('sharing', default=False)
"""Set while pickles go to a worker process of this machine, so that readers take their indices along."""
