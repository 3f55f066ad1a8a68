"""Caches of a source's values: in shared memory for the processes of one machine, or in Redis for several machines."""
