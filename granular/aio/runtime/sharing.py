"""The flag that an object is being pickled for a worker process on this machine."""

import contextvars

sharing: contextvars.ContextVar[bool] = contextvars.ContextVar('sharing', default=False)
"""True while objects are pickled for a worker process on this machine, so that readers include their indices."""
