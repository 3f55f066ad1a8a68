"""What is kept of a source: in shared memory for the processes of a machine, in Redis for several machines."""
