"""The flag that an object is being pickled for a worker process on this machine."""

import contextvars

pickling_for_worker: contextvars.ContextVar[bool] = contextvars.ContextVar('pickling_for_worker', default=False)
"""True while objects are pickled for a worker process on this machine, so that readers include their indices."""
